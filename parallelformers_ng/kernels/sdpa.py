"""Runs transformers' "sdpa" attention of single queries in C, for models whose whole layers cannot run in C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from parallelformers_ng.kernels.operators import KINDS, _decode, fits_mask, mask_arguments, may_serve


def install() -> None:
    """Let transformers' "sdpa" attention use the C kernel for single queries, for all models of this process.

    Without a built kernel, or with several threads of torch, nothing changes.
    """
    if _decode is not None and torch.get_num_threads() == 1:
        usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if not hasattr(usual, "__wrapped__"):
            ALL_ATTENTION_FUNCTIONS.register("sdpa", with_kernel(usual))


def with_kernel(attention: Any) -> Any:
    return with_single_queries(attention, _fits_attention, _attend)


def with_single_queries(attention: Any, fits: Callable[..., bool], attend: Callable[..., Tensor]) -> Any:
    """Wrap an attention function of transformers, so that `attend` computes a call with one query for which `fits`
    returns True."""

    @functools.wraps(attention)
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if fits(module, query, key, value, attention_mask) and _is_plain_attention(query, kwargs):
            return attend(query, key, value, attention_mask, kwargs.get("scaling")), None
        return attention(module, query, key, value, attention_mask, **kwargs)

    return forward


def _is_plain_attention(query: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether a call has one query, `[batch, heads, 1, width]`, and no options except mask and scaling."""
    return (
        query.shape[2] == 1
        and not any(kwargs.get(name) for name in ("dropout", "softcap", "output_attentions"))
        and kwargs.get("position_bias") is None
        and kwargs.get("cache") is None
    )


def _fits_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if not may_serve():
        return False
    batch, heads, _, width = query.shape
    key_batch, kv_heads, tokens, key_width = key.shape
    dtype = query.dtype
    return (
        dtype in KINDS
        and key.dtype is value.dtype is dtype
        and (key_batch, key_width) == (batch, width)
        and value.shape[:3] == key.shape[:3]
        and tokens > 0
        and heads == kv_heads * getattr(module, "num_key_value_groups", 1) > 0
        and query.is_cpu
        and key.is_cpu
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and (mask is None or fits_mask(mask, dtype, batch, heads, tokens))
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    batch, heads, _, width = query.shape
    _, kv_heads, tokens, value_width = value.shape
    out = query.new_empty((batch, 1, heads, value_width))
    _decode.attention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), *key.stride()[:3], *value.stride()[:3],
        *mask_arguments(mask), out.data_ptr(), 0, batch, batch, heads, kv_heads, tokens, width, value_width,
        *query.stride()[:2], KINDS[query.dtype],
        width**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out
