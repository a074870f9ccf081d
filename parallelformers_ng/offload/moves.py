"""Layers that come before they run, and are let go when the next one does. While one computes, the one that followed it
last time is on its way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from parallelformers_ng.checkpoint.staging import Staging
from parallelformers_ng.offload.pages import let_go, read_ahead, replace_by_copies, show_file, source_of, stretches


class MovedLayer:
    """The weights of a layer that lie elsewhere while it does not run. By default its methods do nothing.

    Attributes:
        module: the layer.
        coming: done when it has come; None if nobody has asked for it.
        next: layer that ran after it last time.
    """

    next: MovedLayer

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.coming: Future[None] | None = None

    def bring(self) -> None:
        """Have the weights come. Runs beside the thread that computes, as `drop` does, one of them at a time."""

    def drop(self) -> None:
        """Let them go again."""

    def ask(self) -> None:
        """Queue their copies to the device. In the thread that computes, as what follows."""

    def enter(self) -> None:
        """Have the module take what has come."""

    def leave(self) -> None:
        """Give it back what it has while it does not run."""


class MappedLayer(MovedLayer):
    """Weights that are views of mapped files. They are right at any time. Memory comes and goes: copies of the files,
    read past the system's cache if possible, or else pages of that cache.

    Args:
        tensors: the views.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        super().__init__(module)
        self._tensors = tensors  # while there is a view, nothing else is mapped where the file is
        self._stretches = list(stretches(tensors))
        sources = [source_of(stretch) for stretch in self._stretches]
        known = [(stretch, source) for stretch, source in zip(self._stretches, sources, strict=True) if source]
        self._sources = known if len(known) == len(sources) else []

    def bring(self) -> None:
        if self._sources:
            replace_by_copies(self._sources)
            return
        for stretch in self._stretches:
            read_ahead(stretch)

    def drop(self) -> None:
        for stretch, source in self._sources:
            show_file(stretch, source)
        for stretch in self._stretches:
            let_go(stretch)


class CopiedLayer(MovedLayer):
    """Weights in host memory or in mapped files; a device gets copies. Copies from page-locked memory run ahead while
    the device computes; files are read ahead, and copied when the layer runs.

    Args:
        places: the dictionaries of parameters that have them, and the names there. While the layer does not run they
            hold the weights as they lie in host memory: whoever reads one reads the right numbers.
        staging: buffer for copies from mapped files, since a direct copy would wait for each piece; None for
            page-locked memory.
        device: the CUDA device.
        stream: for copies that go ahead.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[tuple[dict[str, Any], str]],
        staging: Staging | None,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(module)
        self._places = places
        self._homes: list[Tensor] = [table[name] for table, name in places]
        self._mapping = MappedLayer(module, () if staging is None else self._homes)
        self._staging, self._device, self._stream = staging, device, stream
        self._copies: list[Tensor] = []
        self._written = False

    def bring(self) -> None:
        self._mapping.bring()

    def drop(self) -> None:
        self._mapping.drop()

    def ask(self) -> None:
        if self._staging is None:
            if not self._written:  # what filled the homes may still be queued, once
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                self._written = True
            with torch.cuda.stream(self._stream):
                self._copy()
                self._arrived = self._stream.record_event()

    def enter(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._staging is not None:
            self._copy()
        else:
            current.wait_event(self._arrived)
        for (table, name), copy in zip(self._places, self._copies, strict=True):
            copy.record_stream(current)  # its memory is free again when what is queued until then has run
            table[name] = nn.Parameter(copy, requires_grad=False)

    def leave(self) -> None:
        self._copies = []
        for (table, name), home in zip(self._places, self._homes, strict=True):
            table[name] = home

    def _copy(self) -> None:
        if self._staging is None:
            self._copies = [home.to(self._device, non_blocking=True) for home in self._homes]
        else:
            self._copies = [self._staging.to_device(home) for home in self._homes]


class Moves:
    """Has layers come and go around the forwards of a model.

    Args:
        layers: in the order in which they run, as far as that is known.
    """

    def __init__(self, layers: Sequence[MovedLayer]) -> None:
        self._mover = ThreadPoolExecutor(1, "layers")
        self._running: MovedLayer | None = None
        self._ahead: MovedLayer | None = None
        for layer, following in zip(layers, [*layers[1:], *layers[:1]], strict=True):
            layer.next = following
        self._hooks = [layer.module.register_forward_pre_hook(self._hook(layer)) for layer in layers]

    def _hook(self, layer: MovedLayer) -> Any:
        hook: Any = functools.partial(self._before, layer)
        hook.is_blind = True
        return hook

    def _before(self, layer: MovedLayer, module: nn.Module, args: Any) -> None:
        last, ahead = self._running, self._ahead
        if layer is last:
            return
        for other in (last, ahead):
            if other is not None and other is not layer:
                self._release(other)
        if last is not None:
            last.next = layer
        self._running = self._ahead = None
        try:
            self._request(layer).result()
        except BaseException:
            layer.coming = None  # the next call asks again
            raise
        layer.enter()
        self._running = layer
        if layer.next is not layer:
            self._request(layer.next)
            self._ahead = layer.next

    def _request(self, layer: MovedLayer) -> Future[None]:
        if layer.coming is None:
            layer.ask()
            layer.coming = self._mover.submit(layer.bring)
        return layer.coming

    def _release(self, layer: MovedLayer) -> None:
        layer.leave()
        layer.coming = None
        self._mover.submit(layer.drop)

    def close(self) -> None:
        """Have no layer come or go any more."""
        for hook in self._hooks:
            hook.remove()
        self._mover.shutdown()
