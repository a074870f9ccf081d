"""Layers whose decode step runs in `_decode.c`: they read their weights at the full speed of the memory and spend one
call where torch spends several.

All of them stand back for torch wherever it must do the work: gradients, autocast, `torch.compile`, other data types.
Sums run in another order than torch's, so results may differ in the last bits.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

try:
    from parallelformers_ng.kernels import _decode
except ImportError as error:  # installed without a compiler, or a clone that hides what is installed
    _decode = None  # type: ignore[assignment]
    logging.getLogger("parallelformers_ng").debug("decode steps are computed in torch: %s", error)

KINDS = {torch.float32: 0, torch.bfloat16: 1}
# A processor that multiplies bfloat16 itself does so, in torch, twice as fast as the kernel, which widens it to fp32.
_NATIVE_BF16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
MOST_ROWS = {torch.float32: 16, torch.bfloat16: 4 if _NATIVE_BF16 else 32}
"""With more rows torch's matrix product is as fast or faster."""


class StreamingLinear(nn.Linear):
    """`nn.Linear` for one row or a few. The kernel has one thread. The rows of the weight may lie apart."""

    def forward(self, input: Tensor) -> Tensor:
        # Called for every matrix and token: the dictionary is read directly, past nn.Module.__getattr__.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if (
            weight is None
            or not _fits(input, weight)
            or not 0 < input.numel() <= MOST_ROWS[input.dtype] * weight.shape[1]
            or input.shape[-1] != weight.shape[1]
            or weight.stride(1) != 1
        ):
            return super().forward(input)
        outputs, inputs = weight.shape
        out = input.new_empty((*input.shape[:-1], outputs))
        rows, kind = input.numel() // inputs, KINDS[input.dtype]
        address = 0 if bias is None else bias.data_ptr()
        stride = weight.stride(0)
        _decode.linear(
            input.data_ptr(), weight.data_ptr(), address, out.data_ptr(), rows, inputs, stride, outputs, kind
        )
        return out


class FusedRMSNorm(nn.Module):
    """Llama's root-mean-square norm and its many copies, mixed into their classes."""

    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        if (
            weight is None
            or not _fits(hidden_states, weight)
            or hidden_states.shape[-1:] != weight.shape
            or not weight.is_contiguous()
        ):
            return super().forward(hidden_states)
        out = torch.empty_like(hidden_states)
        width = weight.shape[0]
        rows, kind = hidden_states.numel() // width, KINDS[hidden_states.dtype]
        source, target = hidden_states.data_ptr(), out.data_ptr()
        _decode.rms_norm(source, weight.data_ptr(), target, rows, width, kind, self.variance_epsilon)
        return out


def may_serve() -> bool:
    """Whether nothing is going on that only torch's own operators know how to do: gradients, autocast, a trace."""
    return (
        not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
    )


def _fits(input: Tensor, weight: Tensor) -> bool:
    return (
        may_serve()
        and input.dtype in KINDS
        and weight.dtype is input.dtype
        and input.is_cpu
        and weight.is_cpu
        and input.is_contiguous()
    )
