"""Attention of one new token over a cache, in `_attention.h`: keys and values are read once, where they lie."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from parallelformers_ng.kernels.streaming_linear import KINDS, _decode, may_serve

_NO_MASK, _BOOL_MASK, _ADDED_MASK = range(3)


def install_attention() -> None:
    """From now on the models of this process that ask transformers for "sdpa" get the kernel for single queries, where
    it is there and torch has one thread. Idempotent."""
    if _decode is not None and torch.get_num_threads() == 1 and not is_installed():
        ALL_ATTENTION_FUNCTIONS.register("sdpa", with_kernel(ALL_ATTENTION_FUNCTIONS["sdpa"]))


def is_installed() -> bool:
    """Whether "sdpa" is the kernel's."""
    return hasattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "__wrapped__")


def is_usual() -> bool:
    """Whether "sdpa" is what transformers means by it, with the kernel or without, and not a function of the user's."""
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return getattr(attention, "__wrapped__", attention) is sdpa_attention_forward


def with_kernel(attention: Any) -> Any:
    """`attention`, a function of transformers' attention interface, with the kernel for what the kernel can do."""

    @functools.wraps(attention)
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if (
            may_serve()
            and query.shape[2] == 1
            and not any(kwargs.get(name) for name in ("dropout", "softcap", "output_attentions"))
            and kwargs.get("position_bias") is None
            and kwargs.get("cache") is None
            and _fits(module, query, key, value, attention_mask)
        ):
            return _attend(query, key, value, attention_mask, kwargs.get("scaling")), None
        return attention(module, query, key, value, attention_mask, **kwargs)

    return forward


def _fits(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    batch, heads, _, width = query.shape
    key_batch, kv_heads, tokens, key_width = key.shape
    dtype = query.dtype
    return (
        dtype in KINDS
        and key.dtype is dtype
        and value.dtype is dtype
        and key_batch == batch
        and key_width == width
        and value.shape[:3] == key.shape[:3]
        and tokens > 0
        and kv_heads > 0
        and heads == kv_heads * getattr(module, "num_key_value_groups", 1)
        and query.is_cpu
        and key.is_cpu
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and (mask is None or fits_mask(mask, dtype, batch, heads, tokens))
    )


def fits_mask(mask: Tensor, dtype: torch.dtype, batch: int, heads: int, tokens: int) -> bool:
    """Whether the kernel reads such a mask: bool or added, `[batch or 1, heads or 1, 1, tokens]`."""
    return (
        mask.ndim == 4
        and (mask.dtype is torch.bool or mask.dtype is dtype)
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads)
        and mask.shape[2:] == (1, tokens)
        and mask.stride(3) == 1
    )


def mask_arguments(mask: Tensor | None) -> tuple[int, int, int, int]:
    """For the kernel: the address of a mask, its distances from one sequence and one head to the next, its kind."""
    if mask is None:
        return 0, 0, 0, _NO_MASK
    batch, head = (0 if mask.shape[dim] == 1 else mask.stride(dim) * mask.itemsize for dim in (0, 1))
    return mask.data_ptr(), batch, head, _BOOL_MASK if mask.dtype is torch.bool else _ADDED_MASK


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of `[batch, heads, 1, width]` over `[batch, kv_heads, tokens, width]`.

    Returns:
        `[batch, 1, heads, value_width]`, contiguous.
    """
    batch, heads, _, width = query.shape
    _, kv_heads, tokens, value_width = value.shape
    out = query.new_empty((batch, 1, heads, value_width))
    mask_at, *how_masked = mask_arguments(mask)
    _decode.attention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), mask_at, out.data_ptr(),
        batch, heads, kv_heads, tokens, width, value_width,
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *how_masked, KINDS[query.dtype],
        width**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out
