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

# Pairs of a boolean mask and its converted form. Masks are compared by identity, so the list keeps them alive.
_converted: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("_converted", default=None)


def masks_converted_once() -> AbstractContextManager[None]:
    """Inside the `with` block, a forward pass, let `added` convert each mask only once. Masks must not change."""
    return set_within(_converted, [])


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Inside `masks_converted_once`, convert a boolean mask to numbers to add to the scores. Other masks are returned
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
