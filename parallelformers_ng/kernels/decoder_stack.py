"""Runs a step through all decoder layers of a rank in one C call (`_stack.h`), if the model does nothing between
them."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from parallelformers_ng.collectives.shared_memory import KINDS as SUM_KINDS
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator
from parallelformers_ng.generation.in_place_cache import extended_jointly, joint_room
from parallelformers_ng.kernels.decoder_layer import FusedDecoderLayer
from parallelformers_ng.kernels.layer_halves import AttentionHalf, FeedHalf, Step, is_step
from parallelformers_ng.kernels.operators import Guard, _decode, may_serve
from parallelformers_ng.kernels.recognition import is_known
from parallelformers_ng.sharding.cache_names import CACHE
from parallelformers_ng.sharding.placed import Placed

# One call of C computes at most this number of decode steps, each over a cache of its own.
MAX_STEPS: int = getattr(_decode, "MAX_STEPS", 1)


def bytes_ahead(model: nn.Module) -> int:
    """Return how many bytes of weights a rank with one thread can prefetch in a decode step, while the rank waits for
    other ranks. The result is 0 for a model whose layers C cannot compute."""
    dense_layers = 0
    for module in model.modules():
        layers: Any = module.layers if is_known(module, "Model") else ()
        dense_layers += sum(is_known(getattr(layer, "mlp", layer), "MLP") for layer in layers)
    return dense_layers * getattr(_decode, "NEXT_BYTES", 0)


class LayersAsOne(nn.ModuleList):
    """A list of decoder layers that a model's forward can run as a single layer, the function `run`.

    Attributes:
        as_one: whether a slice of all layers returns `[run]`; true during the forward of a model with nothing between
            its layers.
    """

    as_one = False
    # The last result of `_new_view`. None is kept, too, so that a failed check is not repeated in each step.
    _known: tuple[Any, Sequence[Guard]] | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.as_one and isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return (self.run,)
        return super().__getitem__(index)

    def run(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Return the last layer's output. This class runs the modules; subclasses run kernels if possible."""
        for layer in self:
            hidden = layer(hidden, **kwargs)
        return hidden

    def view(self) -> Any:
        """Return the object that runs all layers by kernels, or None if the kernels cannot. The object is kept until a
        parameter is replaced or moved."""
        if any(layer.training for layer in self):
            return None
        if self._known is None or not all(guard.holds() for guard in self._known[1]):
            self._known = self._new_view()
        return self._known[0]

    def _new_view(self) -> tuple[Any, Sequence[Guard]]:
        """Return the object that runs all layers by kernels, or None; and guards that notice changes of the modules."""
        raise NotImplementedError

    def forget(self) -> None:
        self._known = None


class DecoderStack(LayersAsOne):
    """Decoder layers that one call of C computes, if C can.

    Attributes:
        instead: function that `run` calls instead of `run_alone`, for example to compute several steps in one call; or
            None.
    """

    instead: Callable[..., Tensor] | None = None

    def run(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        return (self.instead or self.run_alone)(hidden, **kwargs)

    def run_alone(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        step = self.step_in_c(hidden, **kwargs)
        layer: Any
        last = self[-1]
        if step is None or (isinstance(last, Placed) and not last.is_merged):
            return super().run(hidden, **kwargs)
        if not isinstance(last, Placed):
            return step.run()
        for layer in self:
            if not layer.is_here:
                hidden = layer(hidden, **kwargs)
            elif layer.stop.ends:
                hidden = layer.give(step._replace(hidden=hidden).run)
        return hidden

    @property
    def max_rows(self) -> int:
        """Largest number of tokens that one call of C computes; 0 if C cannot compute the layers."""
        view: StackInC | None = self.view() if may_serve() else None
        return 0 if view is None else view.max_rows

    def step_in_c(self, hidden: Tensor, **kwargs: Any) -> StepInC | None:
        """Return a step through all layers of this rank, ready for C; None if C cannot compute the step. The arguments
        are those of a decoder layer's forward."""
        stack: StackInC | None = self.view() if is_step(hidden) and may_serve() else None
        step = None if stack is None else stack.step_for(hidden, **kwargs)
        return None if stack is None or step is None else StepInC(stack, hidden, step, kwargs[CACHE])

    def _new_view(self) -> tuple[StackInC | None, Sequence[Guard]]:
        own_layers = [layer for layer in self if not isinstance(layer, Placed) or layer.is_here]
        stack = StackInC.of(own_layers)
        if stack is not None:
            stack.guard.watch((self._modules, name) for name in self._modules)
        return stack, () if stack is None else (stack.guard,)


@functools.cache
def with_layers_as_one(cls: Any, device: str = "cpu") -> Any:
    """Return a subclass of a model's class whose forward runs the model's `layers`, a `LayersAsOne`, as a single layer.

    The model's own forward must do nothing between its layers.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In a model with several layer types, layers get different masks, so the layers cannot run as one.
        if not may_serve(device) or len(set(getattr(self.config, "layer_types", None) or ())) > 1:
            return cls.forward(self, *args, **kwargs)
        own = vars(self.layers)  # because `setattr` would record a change of the model's state
        own["as_one"] = True
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            own["as_one"] = False

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


class StackInC:
    """The arguments of the C function that computes all decoder layers of a rank in one call."""

    def __init__(self, layers: Iterable[nn.Module], halves: list[tuple[AttentionHalf, FeedHalf]]) -> None:
        self._attentions = [attention for attention, _ in halves]
        self._first = self._attentions[0]
        self._places = [attention.layer_idx for attention in self._attentions]
        self._shares_room = len({attention.kv_heads for attention in self._attentions}) == 1
        self.max_rows = min(half.max_rows for pair in halves for half in pair)
        self.guard = Guard.together([half.guard for pair in halves for half in pair] + [Guard((), layers)])
        self._sum_kind = SUM_KINDS[self._first.dtype]
        communicators = {half.communicator for pair in halves for half in pair if _is_partial(half)}
        self._communicator: Any = communicators.pop() if communicators else None
        self._layers = b"".join(_packed(*pair) for pair in halves)

    @classmethod
    def of(cls, layers: list[nn.Module]) -> StackInC | None:
        """Return the C arguments for decoder layers; None if one call of C cannot compute all of them."""
        halves = [layer.halves() if isinstance(layer, FusedDecoderLayer) else (None, None) for layer in layers]
        known = [(attention, feed) for attention, feed in halves if attention is not None and feed is not None]
        if not known or len(known) < len(halves):
            return None
        flat = [half for pair in known for half in pair]
        alike = (
            len({(half.hidden, half.dtype) for half in flat}) == 1
            and len({(id(half.config), half.heads, half.width, half.is_causal) for half, _ in known}) == 1
            and len({half.layer_idx for half, _ in known}) == len(known)
            and len({half.communicator for half in flat if _is_partial(half)}) <= 1
        )
        summed = all(isinstance(half.communicator, SharedMemoryCommunicator) for half in flat if _is_partial(half))
        stack = cls(layers, known) if alike and summed else None
        return None if stack is None or stack.guard.patched else stack

    def step_for(self, hidden: Tensor, **kwargs: Any) -> Step | None:
        """Return the step's kernel arguments, from the arguments of a decoder layer's forward; None if C cannot compute
        the step."""
        step = None if self.guard.has_hooks() else self._first.step_for(hidden, **kwargs)
        cache: Any = kwargs.get(CACHE)
        if step is None or joint_room(cache, self._cached(cache)) is not None:
            return step  # one tensor has all layers' keys and values, so all shapes are equal
        if not all(attention.may_extend(cache, step) for attention in self._attentions):
            return None
        return step if len({attention.tokens_in(cache) for attention in self._attentions}) == 1 else None

    def _cached(self, cache: DynamicCache) -> list[Any]:
        return [cache.layers[place] for place in self._places] if max(self._places) < len(cache.layers) else []

    def _lengthened(self, cache: DynamicCache, step: Step) -> bytes:
        """Make room in the cache for the step's tokens; return a C struct `Cached` (`_queries.h`) for each layer."""
        if self._shares_room:
            layers = self._cached(cache)
            has_tokens = layers[0].is_initialized and layers[0].keys.numel()
            like = layers[0].keys if has_tokens else self._first.empty_like(step)
            addresses = extended_jointly(cache, layers, step.queries, like)
            if addresses is not None:
                return addresses
        return b"".join(struct.pack("=8Q", *attention.lengthen(cache, step)) for attention in self._attentions)

    def run(self, *steps: StepInC) -> list[Tensor]:
        """Append new keys and values to the caches, and return the last layer's output of each step, `[batch, tokens,
        hidden]`.

        C reads the weights once for all steps. Each step must have passed `fits_beside` with the others.
        """
        is_alone = len(steps) == 1
        out = steps[0].hidden.clone() if is_alone else torch.cat([each.hidden.flatten(0, 1) for each in steps])
        of_steps = [(self._lengthened(each.cache, each.step), *each.step.arguments) for each in steps]
        arguments = chain.from_iterable(
            (*numbers, self._first.tokens_in(each.cache), self._first.kind)
            for numbers, each in zip(of_steps, steps, strict=True)
        )
        kernel = None if self._communicator is None else self._communicator.kernel
        status = _decode.decoder_layers(kernel, self._sum_kind, self._layers, out.data_ptr(), *arguments)
        if status:
            self._communicator.check(status, "all_reduce")
        if is_alone:
            return [out]
        outputs = out.split([each.hidden.shape[:2].numel() for each in steps])
        return [output.view(each.hidden.shape) for output, each in zip(outputs, steps, strict=True)]


class StepInC(NamedTuple):
    """A decode step over one cache, ready for C. One call of C can compute several steps."""

    stack: StackInC
    hidden: Tensor
    step: Step
    cache: DynamicCache

    def run(self) -> Tensor:
        return self.stack.run(self)[0]

    def fits_beside(self, others: Sequence[StepInC]) -> bool:
        rows = sum(each.hidden.shape[:2].numel() for each in (self, *others))
        differ = all(self.stack is other.stack and self.cache is not other.cache for other in others)
        return differ and len(others) < MAX_STEPS and rows <= self.stack.max_rows


def _is_partial(half: AttentionHalf | FeedHalf) -> bool:
    return half.communicator is not None and half.communicator.world_size > 1


def _packed(attention: AttentionHalf, feed: FeedHalf) -> bytes:
    # The bytes must have the layout of the C struct `Layer` (`_stack.h`), whose last 4 bytes are padding.
    numbers = (*attention.static, *feed.static, _is_partial(attention), _is_partial(feed))
    floats = (*attention.epsilons, attention.scaling, *feed.epsilons)
    return struct.pack(f"={len(numbers)}Q{len(floats)}f4x", *numbers, *floats)
