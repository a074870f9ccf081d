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


class MappedLayer:
    """The weights of a layer on CPU, as views of mapped files, so that other code can read them at any time.

    Before the layer runs, its weights are read into memory: with direct I/O if possible, else into the page cache.

    Args:
        tensors: weights whose pages are read and freed; empty if no page of the layer has to move.

    Attributes:
        coming: future of `bring`, which moves the weights to the device; None if the move was not requested.
        going: future of `drop`, which moves them away; None if a forward pass has already waited for it.
        next: layer that ran after this layer in the last forward pass, and is expected to do so again.
    """

    next: MappedLayer

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor] = ()) -> None:
        self.module = module
        self.coming: Future[None] | None = None
        self.going: Future[None] | None = None
        self._tensors = tensors  # the files stay mapped while their tensors live
        self._stretches = stretches(tensors)
        sources = [(stretch, source) for stretch in self._stretches if (source := source_of(stretch))]
        self._sources = sources if len(sources) == len(self._stretches) else []

    def bring(self) -> None:
        """Read the weights into memory, in the mover thread. The forward pass that waits raises this method's
        OSError."""
        if self._sources:
            replace_by_copies(self._sources)
            return
        for stretch in self._stretches:
            read_ahead(stretch)

    def drop(self) -> None:
        """Free the memory of the weights, in the mover thread. The next forward pass raises this method's OSError."""
        for stretch, source in self._sources:
            show_file(stretch, source)
        for stretch in self._stretches:
            evict(stretch)

    def ask(self) -> None:
        """Start asynchronous copies of the weights to the device, in the thread of the forward pass."""

    def enter(self) -> None:
        """Set the device copies of the weights as the module's parameters, in the thread of the forward pass."""

    def leave(self) -> None:
        """Set the offloaded weights as the module's parameters again, in the thread of the forward pass."""


class CopiedLayer(MappedLayer):
    """Weights of a layer in host memory or in mapped files, which are copied to a CUDA device while the layer runs.

    Weights in pinned memory are copied while the device computes earlier layers. Weights in mapped files are read into
    memory meanwhile, and copied to the device when the layer runs.

    Args:
        places: for each weight, the `_parameters` of its module, and the weight's name in it. While the layer does not
            run, `_parameters` has the weight in host memory.
        staging: buffers for copies from mapped files; None for weights in pinned memory.
        stream: CUDA stream for the copies of weights in pinned memory.
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
            if not self._written:  # the device may still be writing the weights to host memory
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
            copy.record_stream(current)  # otherwise torch may reuse the memory while this stream reads it
            table[name] = nn.Parameter(copy, requires_grad=False)

    def leave(self) -> None:
        self._copies = []
        for (table, name), home in zip(self._places, self._homes, strict=True):
            table[name] = home


class Moves:
    """Forward pre-hooks that move each layer's weights to the device before it runs, and away afterwards.

    While a layer computes, a thread already reads the weights of the next layer into memory.

    Args:
        layers: the layers, in the expected order of running.
    """

    def __init__(self, layers: Sequence[MappedLayer]) -> None:
        self._mover = ThreadPoolExecutor(1, "layers")
        self._running: MappedLayer | None = None
        self._ahead: MappedLayer | None = None
        for layer, following in zip(layers, [*layers[1:], *layers[:1]], strict=True):
            layer.next = following
        self._hooks = []
        for layer in layers:
            hook: Any = functools.partial(self._before, layer)
            hook.is_blind = True
            self._hooks.append(layer.module.register_forward_pre_hook(hook))

    def _before(self, layer: MappedLayer, module: nn.Module, args: Any) -> None:
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
                going.result()  # raises the error of `drop`, which the mover thread ran before `bring`
        except BaseException:
            layer.coming = None  # the next forward pass tries the failed move again
            raise
        layer.enter()
        self._running = layer
        if layer.next is not layer:
            self._request(layer.next)
            self._ahead = layer.next

    def _request(self, layer: MappedLayer) -> Future[None]:
        if layer.coming is None:
            layer.ask()
            layer.coming = self._mover.submit(layer.bring)
        return layer.coming

    def _release(self, layer: MappedLayer) -> None:
        layer.leave()
        layer.coming = None
        layer.going = self._mover.submit(layer.drop)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._mover.shutdown()
