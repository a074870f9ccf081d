"""Keys and values in int8. One head's keys of one token, or its values, share a scale: the largest of them over 127.

Attention reads the stored values, even for the tokens of the current forward. So results do not depend on the pieces of
a prompt, nor on a known beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

_LARGEST = 127
_SCALE = torch.bfloat16
"""Of the range of float32. That it is coarse does no harm: numbers are divided by the scale that is kept."""


class Int8Layer(DynamicLayer):
    """A layer of a cache, made of two plain ones that grow, are cropped and are reordered alike.

    Attributes:
        parts: their keys and values are the codes, `[batch, heads, tokens, width]`, int8; and the scales, `[batch,
            heads, tokens, 1]`.
    """

    parts: tuple[DynamicLayer, DynamicLayer]

    def __init__(self) -> None:
        self.parts = DynamicLayer(), DynamicLayer()
        self._dtypes = torch.float32, torch.float32

    @property
    def is_initialized(self) -> bool:
        return self.parts[0].is_initialized

    @property
    def keys(self) -> Tensor | None:
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
    """Encode numbers `[…, width]` as codes, int8, and scales. If one number is not finite, all `width` become NaN."""
    scales = (states.abs().amax(-1, keepdim=True).float() / _LARGEST).to(_SCALE)
    codes = states / scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    return codes.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


def _numbers(codes: Tensor | None, scales: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if codes is None or scales is None else codes * scales.to(dtype)
