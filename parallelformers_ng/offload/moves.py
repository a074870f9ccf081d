"""Moves the weights of each layer to the device before the layer runs, and away when another layer runs.

While a layer computes, the layer that is expected to run next is already moved to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from parallelformers_ng.checkpoint.staging import Staging
from parallelformers_ng.offload.pages import evict, read_ahead, replace_by_copies, show_file, source_of, stretches


class MovedLayer:
    """The weights of a layer that are offloaded while the layer does not run. The methods of this class do nothing.

    Attributes:
        coming: future that is done when `bring` has finished; None if no move to the device has been requested.
        going: future that is done when `drop` has finished; None if a forward pass has waited for it.
        next: layer that ran after this layer last time.
    """

    next: MovedLayer

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.coming: Future[None] | None = None
        self.going: Future[None] | None = None

    def bring(self) -> None:
        """Read the weights into memory. Called in the mover thread; the waiting forward pass raises an OSError."""

    def drop(self) -> None:
        """Free their memory. Called in the mover thread; the layer's next forward pass raises an OSError."""

    def ask(self) -> None:
        """Queue copies of the weights to the device. Called in the thread that computes."""

    def enter(self) -> None:
        """Set the weights on the device as the module's parameters. Called in the thread that computes."""

    def leave(self) -> None:
        """Set the offloaded weights as the module's parameters again. Called in the thread that computes."""


class MappedLayer(MovedLayer):
    """A layer whose weights are views of mapped files. Code outside the layer can read the weights at any time.

    While the layer runs, its pages are copies of the file, read with direct I/O, or pages of the page cache.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        super().__init__(module)
        self._tensors = tensors  # keeps the file mapped, so that its addresses are not reused
        self._stretches = stretches(tensors)
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
            evict(stretch)


class CopiedLayer(MappedLayer):
    """Weights of a layer in host memory or in mapped files, which are copied to a CUDA device while the layer runs.

    Weights in page-locked memory are copied ahead, while the device computes earlier layers. Weights in mapped files
    are read into memory ahead, and copied to the device when the layer runs.

    Args:
        places: for each weight, the parameter dictionary of its module, and the weight's name in that dictionary. While
            the layer does not run, the dictionary has the weight in host memory.
        staging: buffers for copies from mapped files; None for weights in page-locked memory.
        stream: CUDA stream of the copies that run ahead.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[tuple[dict[str, Any], str]],
        staging: Staging | None,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._homes: list[Tensor] = [table[name] for table, name in places]
        super().__init__(module, () if staging is None else self._homes)
        self._places = places
        self._staging, self._device, self._stream = staging, device, stream
        self._copies: list[Tensor] = []
        self._written = False

    def ask(self) -> None:
        if self._staging is None:
            if not self._written:  # the first time, wait for queued writes to the weights in host memory
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                self._written = True
            with torch.cuda.stream(self._stream):
                self._copies = [home.to(self._device, non_blocking=True) for home in self._homes]
                self._arrived = self._stream.record_event()

    def enter(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._staging is None:
            current.wait_event(self._arrived)
        else:
            self._copies = [self._staging.to_device(home) for home in self._homes]
        for (table, name), copy in zip(self._places, self._copies, strict=True):
            copy.record_stream(current)  # torch frees the copy only after the work that is queued on this stream
            table[name] = nn.Parameter(copy, requires_grad=False)

    def leave(self) -> None:
        self._copies = []
        for (table, name), home in zip(self._places, self._homes, strict=True):
            table[name] = home


class Moves:
    """Moves layers to the device and away during forward passes of a model, by hooks on the layers.

    A thread reads the next layer into memory while a layer computes.

    Args:
        layers: the layers, in the expected order of running.
    """

    def __init__(self, layers: Sequence[MovedLayer]) -> None:
        self._mover = ThreadPoolExecutor(1, "layers")
        self._running: MovedLayer | None = None
        self._ahead: MovedLayer | None = None
        for layer, following in zip(layers, [*layers[1:], *layers[:1]], strict=True):
            layer.next = following
        self._hooks = []
        for layer in layers:
            hook: Any = functools.partial(self._before, layer)
            hook.is_blind = True
            self._hooks.append(layer.module.register_forward_pre_hook(hook))

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
            going, layer.going = layer.going, None
            if going is not None:
                going.result()  # done, because the mover drops a layer before it brings the layer again
        except BaseException:
            layer.coming = None  # the next call requests the layer again
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
        layer.going = self._mover.submit(layer.drop)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._mover.shutdown()
