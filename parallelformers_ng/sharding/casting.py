"""Which tensors a change of data type reaches."""

from __future__ import annotations

import torch
from torch import nn


class CastRule:
    """Which floating-point tensors a cast reaches: all but those that the model class keeps in fp32 (as
    `from_pretrained(dtype=…)` does; `PreTrainedModel._get_dtype_plan`)."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        in_fp32: set[str] = set()
        if dtype == torch.float16:
            in_fp32 |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        if dtype in (torch.float16, torch.bfloat16):
            in_fp32 |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        self.in_fp32 = in_fp32

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self.dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        kept = any(f".{part}." in f".{name}." for part in self.in_fp32)
        return torch.float32 if kept else self.dtype
