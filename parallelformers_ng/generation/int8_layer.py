"""Stores keys and values in int8, with one scale for the keys, and one for the values, of each token and head.

The scale is the largest absolute value divided by 127. Attention reads the quantized values, even for the tokens of the
current forward pass. So results do not depend on how a prompt is split, or on whether its beginning was cached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

_LARGEST = 127
# bfloat16 has the range of float32. Its rounding adds no error: keys and values are divided by the rounded scale.
_SCALE = torch.bfloat16


class Int8Layer(DynamicLayer):
    """A cache layer with int8 keys and values, stored in two `DynamicLayer`s: one for int8 codes, one for scales."""

    parts: tuple[DynamicLayer, DynamicLayer]

    def __init__(self) -> None:
        self.parts = DynamicLayer(), DynamicLayer()
        self._dtypes = torch.float32, torch.float32

    @property
    def is_initialized(self) -> bool:
        return self.parts[0].is_initialized

    @property
    def keys(self) -> Tensor | None:
        """Keys, dequantized at each access to the data type of the newest keys; None for an empty layer."""
        codes, scales = self.parts
        return _numbers(codes.keys, scales.keys, self._dtypes[0])

    @property
    def values(self) -> Tensor | None:
        codes, scales = self.parts
        return _numbers(codes.values, scales.values, self._dtypes[1])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._dtypes = key_states.dtype, value_states.dtype
        self.dtype, self.device = key_states.dtype, key_states.device
        for part, keys, values in zip(self.parts, quantized(key_states), quantized(value_states), strict=True):
            part.lazy_initialization(keys, values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._dtypes = key_states.dtype, value_states.dtype
        for part, keys, values in zip(self.parts, quantized(key_states), quantized(value_states), strict=True):
            part.update(keys, values)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.parts[0].get_seq_length()


def _to_both(name: str) -> Callable[..., None]:
    def call(layer: Int8Layer, *args: Any, **kwargs: Any) -> None:
        for part in layer.parts:
            getattr(part, name)(*args, **kwargs)

    return call


for _name in (
    "crop", "reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "offload", "prefetch",
):  # fmt: skip
    setattr(Int8Layer, _name, _to_both(_name))


def quantized(states: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize floating-point numbers `[…, width]` to int8 codes `[…, width]` and bfloat16 scales `[…, 1]`.

    If a number is not finite, all `width` numbers with the same scale become NaN.
    """
    scales = (states.abs().amax(-1, keepdim=True).float() / _LARGEST).to(_SCALE)
    codes = states / scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    return codes.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


def _numbers(codes: Tensor | None, scales: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if codes is None or scales is None else codes * scales.to(dtype)
