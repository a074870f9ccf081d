"""Describes a kernel launch as data, so that tests can also compile it for cards that are not in the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        arguments: tensors and numbers by name; None for a missing optional tensor.
        constants: arguments of type `tl.constexpr`, by name.
        stages: number of iterations of the inner loop whose loads are in flight at the same time.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Queue the kernel on the current stream. An empty grid launches nothing."""
        if all(self.grid):
            options = {"num_warps": self.warps, "num_stages": self.stages}
            self.kernel[self.grid](**self.arguments, **self.constants, **options)


_library = torch.library.Library("parallelformers_ng", "FRAGMENT")


def operator(schema: str, launches: Callable[..., tuple[Sequence[Launch], Any]]) -> Any:
    """Register a torch operator that launches kernels, and return it.

    Calls of the operator are visible to torch's dispatch modes. `torch.library.custom_op` is not used, because it
    imports the compiler at its first call.

    Args:
        schema: name, arguments and results, in the form of torch's `native_functions.yaml`.
        launches: function of the operator's arguments that allocates the results. It returns the launches that write
            the results, in order, and the results.
    """

    def run(*arguments: Any) -> Any:
        queue, results = launches(*arguments)
        for launch in queue:
            launch.run()
        return results

    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.parallelformers_ng, name).default


# About four programs for each multiprocessor keep the largest cards busy.
_PROGRAMS = 512


def splits_for(programs: int, most: int) -> int:
    """Return into how many splits, 1 to `most`, to divide each program, so that the largest cards are busy."""
    return max(1, min(most, _PROGRAMS // max(1, programs)))
