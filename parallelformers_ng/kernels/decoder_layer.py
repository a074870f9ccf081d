"""Llama's decoder layer and its many copies for one new token of each sequence: two calls of `_layer.h` and the sums
over the ranks behind them, where the modelling code takes some fifty operators.

The modules stay what they are and serve whatever the kernel does not: prompts, gradients, hooks, other caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from parallelformers_ng.generation.growing import extended
from parallelformers_ng.kernels.attention import fits_mask, is_usual, mask_arguments
from parallelformers_ng.kernels.layers import KINDS, MOST_ROWS, FusedRMSNorm, StreamingLinear, _decode, may_serve
from parallelformers_ng.kernels.recognition import is_gated_feed_forward, is_silu, normed_heads
from parallelformers_ng.sharding.layers import HeadParallel, RowParallel, parallel_class

_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position"})
"""What a layer may be given that a single query over a cache has no use for."""


class FusedDecoderLayer(nn.Module):
    """Mixed into the classes of decoder layers whose forward is Llama's."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or self.training or not _is_step(hidden_states) or not may_serve():
            return super().forward(hidden_states, *args, **kwargs)
        layer: Any = self
        attention, feed = self._halves()
        if attention is not None and attention.fits(hidden_states, **kwargs):
            attended = attention.run(hidden_states, **kwargs)
        elif feed is None:
            return super().forward(hidden_states, **kwargs)
        else:
            attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        if feed is not None and feed.fits(hidden_states, attended):
            return feed.run(hidden_states, attended)
        residual = hidden_states + attended
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def _halves(self) -> tuple[AttentionHalf | None, FeedHalf | None]:
        """What the kernel knows of this layer, remembered for as long as it is so."""
        held: tuple[AttentionHalf | None, FeedHalf | None] | None = self.__dict__.get("_kernel_halves")
        if held is None or not all(half is None or half.is_current() for half in held):
            held = self.__dict__["_kernel_halves"] = (AttentionHalf.of(self), FeedHalf.of(self))
        return held


def _is_step(hidden: Tensor) -> bool:
    """Whether a tensor is `[batch, 1, hidden]` as the kernel reads it."""
    return hidden.ndim == 3 and hidden.shape[1] == 1 and hidden.is_cpu and hidden.is_contiguous()


class _Half:
    """One half of a layer as the kernel takes it.

    Args:
        above: modules that it stands for, besides those that hold the tensors. A hook on any is a reason to call them.
        linears: in the kernel's order; the last one's outputs are summed over the ranks.
        norms: in the kernel's order, None for one that the layer does without.
    """

    def __init__(self, above: nn.Module, linears: Sequence[nn.Linear], norms: Sequence[FusedRMSNorm | None]) -> None:
        present = [norm for norm in norms if norm is not None]
        self._places = [(module._parameters, name) for module in linears for name in ("weight", "bias")]
        self._places += [(norm._parameters, "weight") for norm in present]
        self._tensors = [parameters.get(name) for parameters, name in self._places]
        self._hooks = [
            hooks
            for module in (above, *linears, *present)
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        last = linears[-1]
        self._sum = last.communicator.all_reduce if isinstance(last, RowParallel) else None
        self._most_rows = MOST_ROWS[linears[0].weight.dtype]
        self.dtype = linears[0].weight.dtype
        self.kind = KINDS[self.dtype]
        held: list[Tensor | None] = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
        held += [None if norm is None else norm._parameters["weight"] for norm in norms]
        self.static = (
            *(0 if tensor is None else tensor.data_ptr() for tensor in held),
            *(linear.weight.stride(0) for linear in linears),
        )
        self.epsilons = tuple(0.0 if norm is None else norm.variance_epsilon for norm in norms)

    def is_current(self) -> bool:
        """Whether the modules hold the tensors that were looked at."""
        return all(place.get(name) is tensor for (place, name), tensor in zip(self._places, self._tensors, strict=True))

    def may_stand_for_modules(self, hidden: Tensor) -> bool:
        """Whether it takes such an input, `[batch, 1, hidden]`, and nothing wants to see the modules called."""
        return hidden.dtype is self.dtype and hidden.shape[0] <= self._most_rows and not any(self._hooks)

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks."""
        return partial if self._sum is None else self._sum(partial)


class AttentionHalf(_Half):
    """Norm, projections, rotary positions, the cache and attention itself."""

    def __init__(self, layer: Any, norms: Sequence[FusedRMSNorm | None]) -> None:
        attention = layer.self_attn
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        super().__init__(attention, linears, norms)
        self._attention = attention
        self._recording = attention.recording if isinstance(attention, HeadParallel) else None
        self._width = attention.head_dim
        self._kv_heads = attention.k_proj.weight.shape[0] // self._width
        heads, hidden = attention.q_proj.weight.shape[0] // self._width, attention.q_proj.weight.shape[1]
        self.static += (hidden, heads, self._kv_heads, self._width)
        self._heads = heads

    @classmethod
    def of(cls, layer: Any) -> AttentionHalf | None:
        """That of a decoder layer, None where the kernel does not compute it."""
        attention = layer.self_attn
        kind: type = type(attention)
        if kind.__bases__[0] is HeadParallel:
            kind = kind.__bases__[1]
        normed = normed_heads(kind)
        if normed is None:
            return None
        norms = (layer.input_layernorm, *((attention.q_norm, attention.k_norm) if normed else (None, None)))
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        if not _are_readable(linears, norms):
            return None
        q, k, v, o = (linear.weight.shape for linear in linears)
        width, shared = attention.head_dim, attention.num_key_value_groups
        fits = (
            width % 2 == 0
            and k == v
            and k[0] > 0
            and k[0] % width == 0
            and q == (k[0] * shared, k[1])
            and o == (q[1], q[0])
            and all(
                norm is None or norm.weight.shape == (size,)
                for norm, size in zip(norms, (q[1], width, width), strict=True)
            )
        )
        return cls(layer, norms) if fits else None

    def fits(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> bool:
        """Whether the kernel computes it for these arguments of the layer."""
        if (
            not self.may_stand_for_modules(hidden)
            or type(past_key_values) is not DynamicCache
            or past_key_values.offloading
            or position_embeddings is None
            or (self._recording is not None and self._recording.weights)
            or any(value for name, value in others.items() if name not in _HARMLESS)
            or self._attention.config._attn_implementation != "sdpa"
            or not is_usual()
        ):
            return False
        rows, layers, at = hidden.shape[0], past_key_values.layers, self._attention.layer_idx
        if at >= len(layers) or type(layers[at]) is not DynamicLayer or not layers[at].is_initialized:
            return False
        keys, values = layers[at].keys, layers[at].values
        return (
            keys.ndim == 4
            and keys.shape == values.shape
            and (*keys.shape[:2], keys.shape[3]) == (rows, self._kv_heads, self._width)
            and keys.dtype is self.dtype
            and values.dtype is self.dtype
            and all(self._is_position(turn, rows) for turn in position_embeddings)
            and (attention_mask is None or fits_mask(attention_mask, self.dtype, rows, self._heads, keys.shape[2] + 1))
        )

    def _is_position(self, turn: Tensor, rows: int) -> bool:
        return (
            turn.dtype is self.dtype
            and turn.ndim == 3
            and turn.shape[0] in (1, rows)
            and turn.shape[1:] == (1, self._width)
            and turn.stride(2) == 1
        )

    def run(
        self,
        hidden: Tensor,
        past_key_values: Any,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """What the attention adds to `hidden`."""
        keys, values = extended(past_key_values.layers[self._attention.layer_idx], 1)
        cos, sin = position_embeddings
        out = torch.empty_like(hidden)
        _decode.attention_half(
            *self.static, hidden.data_ptr(), out.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), *(0 if turn.shape[0] == 1 else turn.stride(0) for turn in (cos, sin)),
            keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3],
            *mask_arguments(attention_mask), hidden.shape[0], keys.shape[2], self.kind,
            *self.epsilons, self._attention.scaling,
        )  # fmt: skip
        return self.summed(out)


class FeedHalf(_Half):
    """The residual, norm and gated feed-forward."""

    def __init__(self, layer: Any) -> None:
        linears = (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        super().__init__(layer.mlp, linears, (layer.post_attention_layernorm,))
        self._hooks += [layer.mlp.act_fn._forward_hooks, layer.mlp.act_fn._forward_pre_hooks]
        inner, hidden = layer.mlp.gate_proj.weight.shape
        self.static += (hidden, inner)

    @classmethod
    def of(cls, layer: Any) -> FeedHalf | None:
        """That of a decoder layer, None where the kernel does not compute it."""
        mlp = layer.mlp
        kind: type = type(mlp)
        if not is_gated_feed_forward(kind) or not is_silu(type(mlp.act_fn)):
            return None
        linears, norms = (mlp.gate_proj, mlp.up_proj, mlp.down_proj), (layer.post_attention_layernorm,)
        if not _are_readable(linears, norms):
            return None
        gate, up, down = (linear.weight.shape for linear in linears)
        fits = gate == up and down == (gate[1], gate[0]) and gate[0] > 0 and norms[0].weight.shape == (gate[1],)
        return cls(layer) if fits else None

    def fits(self, hidden: Tensor, attended: Tensor) -> bool:
        """Whether the kernel computes it for what came into the layer and what its attention adds."""
        alike = attended.shape == hidden.shape and attended.dtype is hidden.dtype and attended.is_contiguous()
        return alike and self.may_stand_for_modules(hidden)

    def run(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output."""
        residual, out = torch.empty_like(hidden), torch.empty_like(hidden)
        _decode.feed_half(
            *self.static, hidden.data_ptr(), attended.data_ptr(), residual.data_ptr(), out.data_ptr(),
            hidden.shape[0], self.kind, *self.epsilons,
        )  # fmt: skip
        return residual.add_(self.summed(out))


def _are_readable(linears: Sequence[Any], norms: Sequence[Any]) -> bool:
    """Whether the kernel knows the layers, and their tensors are as it reads them: of one type, on CPU, rows dense."""
    *columns, last = linears
    if not all(type(linear) is StreamingLinear for linear in columns) or type(last) not in _LAST:
        return False
    if not all(norm is None or isinstance(norm, FusedRMSNorm) for norm in norms):
        return False
    weights = [linear.weight for linear in linears]
    flat = [linear.bias for linear in linears] + [None if norm is None else norm.weight for norm in norms]
    tensors = [*weights, *(tensor for tensor in flat if tensor is not None)]
    dtype = weights[0].dtype
    return dtype in KINDS and all(t.dtype is dtype and t.is_cpu and t.stride(-1) == 1 for t in tensors)


_LAST = (StreamingLinear, parallel_class(RowParallel, StreamingLinear))
