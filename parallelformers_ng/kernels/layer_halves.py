"""Calls the C functions of `_layer.h`. Each function computes one half of a decoder layer for new tokens.

The halves are `x + attention(norm(x))` and `x + feed_forward(norm(x))`. After the C function of a half, the rank sums
the half's outputs over the ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from parallelformers_ng.generation.in_place_cache import addresses_of, extended
from parallelformers_ng.kernels.operators import (
    KINDS,
    MAX_ROWS,
    MAX_ROWS_OF_INTEGERS,
    FusedRMSNorm,
    Guard,
    StreamingQuantizedLinear,
    _decode,
    data_type_of,
    fits_mask,
    is_usual,
    mask_arguments,
    matrix_arguments,
    shape_of,
    spans_of,
)
from parallelformers_ng.kernels.recognition import are_harmless
from parallelformers_ng.sharding.cache_names import CACHE
from parallelformers_ng.sharding.encoding import SCALE
from parallelformers_ng.sharding.linear import RowParallel

_READ_BY_ATTENTION = ("config", "head_dim", "is_causal", "layer_idx", "num_key_value_groups", "scaling", "training")


def is_step(hidden: Tensor) -> bool:
    """Return whether a tensor is a contiguous, non-empty `[batch, tokens, hidden]` on the CPU."""
    return hidden.ndim == 3 and hidden.is_cpu and hidden.is_contiguous() and hidden.numel() > 0


class Half:
    """The constant kernel arguments of one half of a decoder layer: attention or feed-forward.

    Args:
        above: modules that contain the linear layers, and that the kernel replaces with them.
        linears: linear layers in the order of the C struct. If the last one is row-parallel, its outputs are summed
            over the ranks.
        norms: norms in the order of the C struct; None for a norm that the layer does not have.

    Attributes:
        communicator: communicator that sums the outputs over the ranks; None if the last linear layer is not
            row-parallel.
        kind: number of `dtype` in `KINDS`.
        static: addresses and sizes that are the same in every step, in the order of the C struct.
        epsilons: ε of each norm; 0 for a missing norm.
        max_rows: largest number of tokens, over all sequences, that the kernel computes.
    """

    def __init__(
        self, above: Sequence[nn.Module], linears: Sequence[nn.Linear], norms: Sequence[FusedRMSNorm | None]
    ) -> None:
        present = [norm for norm in norms if norm is not None]
        names = ("weight", "weight" + SCALE, "bias")
        places: list[tuple[dict[str, Any], str]] = [(module._parameters, name) for module in linears for name in names]
        places += [(norm._parameters, "weight") for norm in present]
        places += [(vars(norm), "variance_epsilon") for norm in present]
        places += [(module._modules, name) for module in above for name in module._modules]
        self.guard = Guard(places, (*above, *linears, *present))
        last = linears[-1]
        self.communicator = last.communicator if isinstance(last, RowParallel) else None
        self.hidden, self.dtype = shape_of(linears[0])[1], data_type_of(linears[0])
        is_quantized = any(isinstance(linear, StreamingQuantizedLinear) for linear in linears)
        self.max_rows = (MAX_ROWS_OF_INTEGERS if is_quantized else MAX_ROWS)[self.dtype]
        self.kind = KINDS[self.dtype]
        weights: list[Any] = [None if norm is None else norm._parameters["weight"] for norm in norms]
        self.static = (
            *chain.from_iterable(map(matrix_arguments, linears)),
            *(0 if weight is None else weight.data_ptr() for weight in weights),
        )
        self.epsilons = tuple(0.0 if norm is None else norm.variance_epsilon for norm in norms)

    def may_stand_for_modules(self, hidden: Tensor) -> bool:
        """Return whether the kernel can compute an input, `[batch, tokens, hidden]`, and the modules have no hooks."""
        batch, tokens, width = hidden.shape
        fits = hidden.dtype is self.dtype and width == self.hidden and batch * tokens <= self.max_rows
        return fits and not self.guard.has_hooks()

    def summed(self, partial: Tensor) -> Tensor:
        return partial if self.communicator is None else self.communicator.all_reduce(partial)


class AttentionHalf(Half):
    """The attention half of a layer: norm, projections, rotary positions, cache update and attention.

    Args:
        linears: projections of queries, keys, values and outputs.
        norms: norm of the layer's input, and norms of each head's query and key; None for a missing norm.

    Attributes:
        width: head dimension.
        heads, kv_heads: numbers of query heads and of key/value heads on this rank.
    """

    def __init__(self, attention: Any, linears: Sequence[nn.Linear], norms: Sequence[FusedRMSNorm | None]) -> None:
        super().__init__((attention,), linears, norms)
        self.guard.watch([(vars(attention), name) for name in _READ_BY_ATTENTION])
        self.layer_idx = attention.layer_idx
        self.config = attention.config
        self.width = attention.head_dim
        self.heads, self.kv_heads = (shape_of(linear)[0] // self.width for linear in linears[:2])
        self.static += (self.hidden, self.heads, self.kv_heads, self.width)
        self.scaling = attention.scaling
        self.is_causal = getattr(attention, "is_causal", True) is True

    def step_for(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Step | None:
        """Return the step's kernel arguments, from the arguments of the decoder layer's forward; None if the kernel
        cannot compute the step."""
        cache, is_causal = others.pop(CACHE, None), others.pop("is_causal", None)
        batch, queries, _ = hidden.shape
        if (
            not self.may_stand_for_modules(hidden)
            or type(cache) is not DynamicCache
            or cache.offloading
            or position_embeddings is None
            or not are_harmless(others)
            # A single new token sees all earlier tokens, causal or not. The kernel computes several only causally.
            or (queries > 1 and (self.is_causal if is_causal is None else is_causal) is not True)
        ):
            return None
        step = Step.of(self, (batch, queries), position_embeddings, attention_mask)
        return step if step.fits and self.may_extend(cache, step) else None

    def may_extend(self, cache: DynamicCache, step: Step) -> bool:
        """Return whether the kernel can read this layer's keys and values in the cache, and append the new tokens."""
        layer: Any = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        if type(layer) is not DynamicLayer:
            return False
        if not layer.is_initialized:
            return step.tokens == step.queries
        keys, values = layer.keys, layer.values
        if keys.ndim != 4 or keys.dtype is not self.dtype or values.dtype is not self.dtype:
            return False
        batch, heads, tokens, width = shape = keys.shape
        return (
            values.shape == shape
            and (batch, heads, width) == (step.sequences, self.kv_heads, self.width)
            and step.tokens in (None, tokens + step.queries)
        )

    def run(self, hidden: Tensor, step: Step, cache: DynamicCache) -> Tensor:
        """Append the new keys and values to the cache, and return the attention output, `[batch, tokens, hidden]`,
        summed over the ranks. The residual is not added."""
        out, cache_arguments = torch.empty_like(hidden), self.lengthen(cache, step)
        _decode.attention_half(
            *self.static, *cache_arguments, hidden.data_ptr(), out.data_ptr(), *step.arguments, self.tokens_in(cache),
            self.kind, *self.epsilons, self.scaling,
        )  # fmt: skip
        return self.summed(out)

    def empty_like(self, step: Step) -> Tensor:
        return torch.empty(1, dtype=self.dtype).expand(step.sequences, self.kv_heads, step.queries, self.width)

    def lengthen(self, cache: DynamicCache, step: Step) -> tuple[int, ...]:
        """Make room in this layer's cache for the step's tokens; return `addresses_of` the keys and values."""
        layer: Any = cache.layers[self.layer_idx]
        like = None
        if not layer.is_initialized:
            like = self.empty_like(step)
            layer.lazy_initialization(like, like)
        return addresses_of(*extended(layer, step.queries, like, like))

    def tokens_in(self, cache: DynamicCache) -> int:
        layer: Any = cache.layers[self.layer_idx]
        return int(layer.keys.shape[2]) if layer.is_initialized else 0


class Step:
    """The kernel arguments of a step that all layers share: rotary positions and mask.

    Args:
        shared: model configuration; cosines and sines of the positions, `[sequences or 1, queries, width]` each; and
            mask, `[sequences or 1, heads or 1, queries, tokens]`, or None.
        sizes: (sequences, queries), data type, head dimension, and number of query heads.

    Attributes:
        sequences, queries: number of sequences, and number of new tokens of each sequence.
        tokens: length that each sequence has with the new tokens; None if the mask does not say it.
        fits: whether the kernel can compute attention in this step; if not, `arguments` is missing.
        arguments: addresses, strides and counts, in the order of the C struct `Step`.
    """

    _spans: Tensor | None = None
    # Has at most one step. The list keeps a step alive for a thread that reads it while another thread replaces it.
    _latest: ClassVar[list[Step]] = []

    @classmethod
    def of(
        cls, half: AttentionHalf, shape: tuple[int, int], positions: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Step:
        """Return the previous layer's step if all arguments are the same objects; otherwise make a new step."""
        shared, sizes = (half.config, positions, mask), (shape, half.dtype, half.width, half.heads)
        for latest in cls._latest:
            if sizes == latest._sizes and all(map(operator.is_, shared, latest._shared)):
                return latest
        step = cls(shared, sizes)
        cls._latest[:] = [step]
        return step

    @classmethod
    def forget(cls) -> None:
        """Drop the latest step and its tensors."""
        cls._latest.clear()

    def __init__(
        self,
        shared: tuple[Any, tuple[Tensor, Tensor], Tensor | None],
        sizes: tuple[tuple[int, int], torch.dtype, int, int],
    ) -> None:
        # `of` compares these objects by identity, so they must stay alive: a new object could get the same id.
        self._shared, self._sizes = shared, sizes
        config, rotations, mask = shared
        (self.sequences, self.queries), dtype, width, heads = sizes
        # The mask's last dimension is the cache's length. transformers passes a mask for several new tokens, unless the
        # cache is empty.
        self.tokens = mask.shape[-1] if mask is not None else None if self.queries == 1 else self.queries
        self.fits = (
            config._attn_implementation == "sdpa"
            and is_usual()
            and all(is_rotation(rotation, (self.sequences, self.queries, width), dtype) for rotation in rotations)
        )
        is_alone = self.queries == 1
        if self.fits and not (mask is None and is_alone):
            # With spans instead of a mask, the kernel skips hidden tokens.
            self._spans = spans_of(mask, self.sequences, self.queries)
            fits_alone = is_alone and mask is not None and fits_mask(mask, dtype, self.sequences, heads, mask.shape[-1])
            self.fits = self._spans is not None or fits_alone
        if self.fits:
            cos, sin = rotations
            batches = (0 if angles.shape[0] == 1 else angles.stride(0) for angles in rotations)
            spans = (0, self.sequences) if self._spans is None else (self._spans.data_ptr(), len(self._spans))
            self.arguments = (
                cos.data_ptr(), sin.data_ptr(), *batches, cos.stride(1), sin.stride(1),
                *mask_arguments(mask if self._spans is None else None), *spans,
                self.queries, self.sequences * self.queries,
            )  # fmt: skip


def is_rotation(angles: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a tensor can be the cosines or sines of rotary positions, `[sequences or 1, tokens, width]`, with
    a contiguous last dimension.

    Args:
        shape: `(sequences, tokens, width)`.
    """
    one_of_each = angles.ndim == 3 and angles.shape[0] in (1, shape[0]) and angles.shape[1:] == shape[1:]
    return one_of_each and angles.dtype is dtype and angles.stride(2) == 1


class FeedHalf(Half):
    """The feed-forward half of a layer: residual, norm and gated feed-forward. `linears` are gate, up and down."""

    def __init__(self, mlp: Any, linears: Sequence[nn.Linear], norms: Sequence[FusedRMSNorm]) -> None:
        super().__init__((mlp, mlp.act_fn), linears, norms)
        self.static += (self.hidden, shape_of(linears[0])[0])

    def fits(self, hidden: Tensor, attended: Tensor) -> bool:
        alike = attended.shape == hidden.shape and attended.dtype is hidden.dtype and attended.is_contiguous()
        return alike and self.may_stand_for_modules(hidden)

    def run(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output, from the layer's input and the attention output. All are `[batch, tokens,
        hidden]`."""
        residual, out = torch.empty_like(hidden), torch.empty_like(hidden)
        _decode.feed_half(
            *self.static, hidden.data_ptr(), attended.data_ptr(), residual.data_ptr(), out.data_ptr(),
            hidden.shape[0] * hidden.shape[1], self.kind, *self.epsilons,
        )  # fmt: skip
        return residual.add_(self.summed(out))
