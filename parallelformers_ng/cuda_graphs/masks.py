"""Attention masks of a recorded step, converted once for all its layers.

`scaled_dot_product_attention` takes a mask of booleans, and makes numbers of it that are added to the scores: two
kernels in each layer (`convert_boolean_attn_mask_` in torch's `native/transformers/attention.cpp`). All layers of a
step have the same mask.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor


class _OfStep(threading.local):
    """Masks and what they were converted to, by type. A mask that is held here cannot give its place to another."""

    converted: list[tuple[Tensor, Tensor]] | None = None


_of_step = _OfStep()


@contextlib.contextmanager
def masks_converted_once() -> Iterator[None]:
    """Within it, which is one pass through a model, `added` converts each mask once. Nothing may write to a mask."""
    _of_step.converted = []
    try:
        yield
    finally:
        _of_step.converted = None


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as `scaled_dot_product_attention` takes it. A hidden position gets the least finite number: cuDNN's
    kernels do not take infinities (`convert_boolean_attn_mask_cudnn`), and beside a score that counts both give 0.

    Args:
        mask: mask of booleans, or of numbers to add to the scores; any shape.
        dtype: data type of the queries.

    Returns:
        Numbers of that type if the mask has been converted in this step or can be for all of it, else the mask itself.
    """
    if mask.dtype is not torch.bool or _of_step.converted is None:
        return mask
    for known, numbers in _of_step.converted:
        if known is mask and numbers.dtype is dtype:
            return numbers
    numbers = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), torch.finfo(dtype).min)
    _of_step.converted.append((mask, numbers))
    return numbers
