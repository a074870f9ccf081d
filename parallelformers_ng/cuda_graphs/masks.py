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

# The masks of this thread with their numbers. While a mask is kept here, no other mask can have its identity.
_converted: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("_converted", default=None)


def masks_converted_once() -> AbstractContextManager[None]:
    """Make `added` convert each mask only once inside the `with` block, which is one forward pass. The pass must not
    change a mask."""
    return set_within(_converted, [])


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as numbers to add to the scores, inside of `masks_converted_once`; else the mask itself.

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
