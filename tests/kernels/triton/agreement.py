"""The bar of every kernel: at most two units in the last place of its output, or twice the error of its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIXTEEN_BITS = DTYPES[:2]


def wide(values: Any) -> Any:
    """Return arguments with their floats in fp64; 8-bit floats stay as they are."""

    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.dtype in DTYPES else value

    return tree_map(widened, values)


def assert_agrees(output: Tensor, twin: Callable[..., Any], *arguments: Any) -> None:
    """Assert that a kernel's output meets the bar.

    Args:
        output: output of the kernel.
        twin: returns the output in plain torch.
        arguments: arguments of the twin; in fp64 they give the true output.
    """
    true, plain = twin(*wide(arguments)), twin(*arguments)
    assert output.dtype is plain.dtype
    assert output.shape == true.shape
    assert output.isfinite().all()
    error, of_twin = ((each.double() - true).abs() for each in (output, plain))
    limit = (2 * units(true, output.dtype)).maximum(2 * of_twin.max())
    assert (error <= limit).all(), f"error {error.max():.2e}, the twin's {of_twin.max():.2e}"


def units(true: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighbours of a data type at each number."""
    figures = torch.finfo(dtype)
    exponent = true.abs().clamp(min=figures.smallest_normal).log2().floor()
    return figures.eps * exponent.exp2()


def randn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal random numbers, the same for the same arguments."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed + sum(sizes))).to(dtype)
