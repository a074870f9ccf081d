"""Converts the boolean attention mask of a recorded step to numbers once, instead of once per layer.

`scaled_dot_product_attention` converts a boolean mask to numbers that it adds to the scores, with two kernels in each
layer (`convert_boolean_attn_mask_` in torch's `native/transformers/attention.cpp`). All layers of a step have the same
mask.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

from parallelformers_ng.runtime.limits import set_within

# Pairs of a boolean mask and its converted form. While a mask is kept here, no other object can have its id.
_converted: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("_converted", default=None)


def masks_converted_once() -> AbstractContextManager[None]:
    """Make `added` convert a mask only once inside the `with` block, a forward pass that must not change masks."""
    return set_within(_converted, [])


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to numbers to add to the scores, inside `masks_converted_once`; return other masks
    unchanged.

    A hidden position gets the lowest finite number, because cuDNN's kernels do not accept infinities
    (`convert_boolean_attn_mask_cudnn`). The softmax still gives a hidden position the weight 0 if its row has a visible
    position.
    """
    converted = _converted.get()
    if mask.dtype is not torch.bool or converted is None:
        return mask
    for known, numbers in converted:
        if known is mask and numbers.dtype is dtype:
            return numbers
    numbers = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), torch.finfo(dtype).min)
    converted.append((mask, numbers))
    return numbers
