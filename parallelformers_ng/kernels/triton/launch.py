"""One launch of a kernel, as data: the same description runs it, and compiles it for a card that is not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel, as data.

    Attributes:
        kernel: function decorated with `triton.jit`.
        grid: numbers of programs in one to three dimensions.
        arguments: tensors and numbers by name; None for an optional tensor that is absent.
        constants: arguments of type `tl.constexpr`, by name.
        warps: number of warps, groups of 32 threads, of a program.
        stages: number of iterations of the inner loop whose loads are in flight together.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Queue the kernel on the current stream. A grid with a 0 launches nothing."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)


_library = torch.library.Library("parallelformers_ng", "FRAGMENT")


def operator(schema: str) -> Callable[[Any], Any]:
    """Return a decorator that registers a function as an operator of torch, `torch.ops.parallelformers_ng.NAME`.

    The decorated name is the operator. Dispatch modes of torch see a call of the operator and its tensors.
    `torch.library.custom_op` would import the compiler for its first call.

    Args:
        schema: name, arguments and results, in the form of torch's `native_functions.yaml`.
    """

    def decorated(function: Any) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.parallelformers_ng, name).default

    return decorated


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


_PROGRAMS = 512
"""Programs that keep the largest cards busy: about four for each multiprocessor."""


def splits_for(programs: int, most: int) -> int:
    """Return the number of splits of each program's work with which a launch keeps the largest cards busy, 1 to `most`.

    Args:
        programs: number of programs without splits.
        most: largest number of splits.
    """
    return max(1, min(most, _PROGRAMS // max(1, programs)))
