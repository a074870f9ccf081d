"""Runs Llama's decoder layer, and its many copies in transformers, for new tokens in C.

A layer has two halves (`layer_halves.py`). Per layer, their two calls of C replace about fifty operators of the
modelling code. If the kernel cannot compute a layer, the original modules compute the layer. Examples are gradients,
hooks, other caches, and too many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from parallelformers_ng.kernels.layer_halves import AttentionHalf, FeedHalf, is_step
from parallelformers_ng.kernels.operators import (
    KINDS,
    FusedRMSNorm,
    StreamingLinear,
    StreamingQuantizedLinear,
    data_type_of,
    matrix_of,
    may_serve,
    shape_of,
)
from parallelformers_ng.kernels.recognition import head_norms, is_silu_gated
from parallelformers_ng.sharding.cache_names import CACHE
from parallelformers_ng.sharding.layers import parallel_class
from parallelformers_ng.sharding.linear import RowParallel

_COLUMNS = (StreamingLinear, StreamingQuantizedLinear)
_LAST = (*_COLUMNS, *(parallel_class(RowParallel, cls) for cls in _COLUMNS))


class FusedDecoderLayer(nn.Module):
    """A decoder layer whose two halves run in C if possible; mixed into classes with the forward of Llama's layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or self.training or not is_step(hidden_states) or not may_serve():
            return super().forward(hidden_states, *args, **kwargs)
        layer: Any = self
        attention, feed = self.halves()
        step = None if attention is None else attention.step_for(hidden_states, **kwargs)
        if attention is not None and step is not None:
            attended = attention.run(hidden_states, step, kwargs[CACHE])
        elif feed is None:
            return super().forward(hidden_states, **kwargs)
        else:
            attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        if feed is not None and feed.fits(hidden_states, attended):
            return feed.run(hidden_states, attended)
        residual = hidden_states + attended
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def halves(self) -> tuple[AttentionHalf | None, FeedHalf | None]:
        """Return the kernel arguments of both halves; None for a half that C cannot compute. The result is kept until a
        parameter is replaced or moved."""
        known: tuple[AttentionHalf | None, FeedHalf | None] | None = self.__dict__.get("_kernel_halves")
        if known is None or not all(half is None or half.guard.holds() for half in known):
            known = self.__dict__["_kernel_halves"] = _attention_half(self), _feed_half(self)
            if (half := known[0] or known[1]) is not None:
                half.guard.watch((self._modules, name) for name in self._modules)
        return known

    def forget(self) -> None:
        self.__dict__.pop("_kernel_halves", None)


def _attention_half(layer: Any) -> AttentionHalf | None:
    attention = layer.self_attn
    of_heads = head_norms(attention)
    if of_heads is None or attention.training:  # C has no dropout, which attention may have in training
        return None
    norms = (layer.input_layernorm, *(of_heads or (None, None)))
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    if not _are_readable(linears, norms):
        return None
    q, k, v, o = map(shape_of, linears)
    width, shared = attention.head_dim, attention.num_key_value_groups
    fits = (
        width % 2 == 0
        and k == v
        and k[0] > 0
        and k[0] % width == 0
        and q == (k[0] * shared, k[1])
        and o == (q[1], q[0])
        and all(
            norm is None or norm.weight.shape == (size,) for norm, size in zip(norms, (q[1], width, width), strict=True)
        )
    )
    half = AttentionHalf(attention, linears, norms) if fits else None
    return None if half is None or half.guard.patched else half


def _feed_half(layer: Any) -> FeedHalf | None:
    mlp = layer.mlp
    if not is_silu_gated(mlp):
        return None
    linears, norms = (mlp.gate_proj, mlp.up_proj, mlp.down_proj), (layer.post_attention_layernorm,)
    if not _are_readable(linears, norms):
        return None
    gate, up, down = map(shape_of, linears)
    fits = gate == up and down == (gate[1], gate[0]) and gate[0] > 0 and norms[0].weight.shape == (gate[1],)
    half = FeedHalf(mlp, linears, norms) if fits else None
    return None if half is None or half.guard.patched else half


def _are_readable(linears: Sequence[Any], norms: Sequence[Any]) -> bool:
    """Return whether C can read the weights: known classes of layers, and dense tensors of one data type on the CPU."""
    *columns, last = linears
    if not all(type(linear) in _COLUMNS for linear in columns) or type(last) not in _LAST:
        return False
    present = [norm for norm in norms if norm is not None]
    if not all(isinstance(norm, FusedRMSNorm) for norm in present):
        return False
    if any(isinstance(linear, StreamingQuantizedLinear) and not linear.is_read for linear in linears):
        return False
    tensors = [linear.bias for linear in linears if linear.bias is not None] + [norm.weight for norm in present]
    dtypes = {*map(data_type_of, linears), *(tensor.dtype for tensor in tensors)}
    is_dense = all(t.is_cpu and t.stride(-1) == 1 for t in [*map(matrix_of, linears), *tensors])
    return is_dense and len(dtypes) == 1 and dtypes <= KINDS.keys()
