"""A model's decoder layers as one. If nothing happens between them, one call of `_stack.h` runs a step through all
layers of the rank, sums over the ranks included."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from parallelformers_ng.collectives.shared_memory import KINDS as SUM_KINDS
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator
from parallelformers_ng.kernels.decoder_layer import AttentionHalf, FeedHalf, FusedDecoderLayer, Step, is_step
from parallelformers_ng.kernels.operators import Guard, _decode, may_serve
from parallelformers_ng.sharding.cache_names import CACHE
from parallelformers_ng.sharding.placed import Placed


class LayersAsOne(nn.ModuleList):
    """Decoder layers. To a model that only hands its states from one to the next they show themselves as one layer.

    Attributes:
        as_one: whether they do; true while the forward of such a model runs.
    """

    as_one = False

    def __getitem__(self, index: Any) -> Any:
        if self.as_one and isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return (self.run,)
        return super().__getitem__(index)

    def run(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Return the output of the last layer for `hidden`, with the arguments of each layer."""
        raise NotImplementedError

    def run_modules(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Return the same, from the modules."""
        for layer in self:
            hidden = layer(hidden, **kwargs)
        return hidden


class DecoderStack(LayersAsOne):
    """Decoder layers that the C kernels compute as one."""

    _in_c: _StackInC | None = None
    _was_read = False  # layers that cannot be computed as one at the first step are not looked at again

    def run(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        whole = self._read() if is_step(hidden) and may_serve() else None
        step = None if whole is None else whole.step_for(hidden, **kwargs)
        layer: Any
        last = self[-1]
        if whole is None or step is None or (isinstance(last, Placed) and not last.is_merged):
            return self.run_modules(hidden, **kwargs)
        run = functools.partial(whole.run, step=step, cache=kwargs[CACHE])
        if not isinstance(last, Placed):
            return run(hidden)
        for layer in self:
            if not layer.is_here:
                hidden = layer(hidden, **kwargs)
            elif layer.stop.ends:
                hidden = layer.give(functools.partial(run, hidden))
        return hidden

    def _read(self) -> _StackInC | None:
        """Return the kernel's arguments for the layers, kept until something changes."""
        if not self._was_read or (self._in_c is not None and not self._in_c.guard.holds()):
            here = [layer for layer in self if not isinstance(layer, Placed) or layer.is_here]
            self._in_c, self._was_read = _StackInC.of(here), True
        return None if any(layer.training for layer in self) else self._in_c

    def forget(self) -> None:
        """Read the layers anew before the next step."""
        self._in_c, self._was_read = None, False


@functools.cache
def with_layers_as_one(cls: Any, device: str = "cpu") -> Any:
    """Return the class of a model whose forward does nothing between one of its `layers`, `LayersAsOne`, and the next.

    Args:
        device: type of the device that computes.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # If layers are of several types, each type has a mask of its own.
        if not may_serve(device) or len(set(getattr(self.config, "layer_types", None) or ())) > 1:
            return cls.forward(self, *args, **kwargs)
        self.layers.as_one = True
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self.layers.as_one = False

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


class _StackInC:
    """Layers of which the kernels know both halves."""

    def __init__(self, layers: Iterable[nn.Module], halves: list[tuple[AttentionHalf, FeedHalf]]) -> None:
        self._attentions = [attention for attention, _ in halves]
        self._first = self._attentions[0]
        self.guard = Guard.together([half.guard for pair in halves for half in pair] + [Guard((), layers)])
        self._sum_kind = SUM_KINDS[self._first.dtype]
        communicators = {half.communicator for pair in halves for half in pair if _is_partial(half)}
        self._communicator: Any = communicators.pop() if communicators else None
        self._layers = b"".join(_packed(*pair) for pair in halves)

    @classmethod
    def of(cls, layers: list[nn.Module]) -> _StackInC | None:
        """Return the kernel's view of a model's decoder layers, None if the kernel cannot compute them all as one."""
        halves = [layer.halves() if isinstance(layer, FusedDecoderLayer) else (None, None) for layer in layers]
        known = [(attention, feed) for attention, feed in halves if attention is not None and feed is not None]
        if not known or len(known) < len(halves):
            return None
        both = [half for pair in known for half in pair]
        alike = (
            len({(half.hidden, half.dtype) for half in both}) == 1
            and len({(id(half.config), half.heads, half.width) for half, _ in known}) == 1
            and len({half.layer_idx for half, _ in known}) == len(known)
            and len({half.communicator for half in both if _is_partial(half)}) <= 1
        )
        summed = all(isinstance(half.communicator, SharedMemoryCommunicator) for half in both if _is_partial(half))
        whole = cls(layers, known) if alike and summed else None
        return None if whole is None or whole.guard.patched else whole

    def step_for(self, hidden: Tensor, **kwargs: Any) -> Step | None:
        """Return the shared facts of the layers, from their arguments; None if the kernel does not compute them."""
        if self.guard.has_hooks():
            return None
        step = self._first.step_for(hidden, **kwargs)
        if step is None:
            return None
        cache = kwargs[CACHE]
        if not all(attention.may_extend(cache, step) for attention in self._attentions):
            return None
        return step if len({attention.tokens_in(cache) for attention in self._attentions}) == 1 else None

    def run(self, hidden: Tensor, step: Step, cache: DynamicCache) -> Tensor:
        """Return the last layer's output."""
        out = hidden.clone()
        places = [number for attention in self._attentions for number in attention.lengthen(cache)]
        kernel = None if self._communicator is None else self._communicator.kernel
        status = _decode.decoder_layers(
            kernel, self._sum_kind, self._layers, out.data_ptr(), *step.positions, *step.mask,
            step.rows, self._first.tokens_in(cache), self._first.kind, *places,
        )  # fmt: skip
        if status:
            self._communicator.check(status, "all_reduce")
        return out


def _is_partial(half: AttentionHalf | FeedHalf) -> bool:
    return half.communicator is not None and half.communicator.world_size > 1


def _packed(attention: AttentionHalf, feed: FeedHalf) -> bytes:
    """`Layer` of `_stack.h`."""
    numbers = (*attention.static, *feed.static, _is_partial(attention), _is_partial(feed))
    floats = (*attention.epsilons, attention.scaling, *feed.epsilons)
    return struct.pack(f"={len(numbers)}Q{len(floats)}f4x", *numbers, *floats)
