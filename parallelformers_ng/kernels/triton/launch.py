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
        arguments: tensors and numbers by name; None for an optional tensor that is absent.
        constants: arguments of type `tl.constexpr`, by name.
        stages: number of iterations of the inner loop whose loads are in flight together.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Queue the kernel on the current stream. A grid with a 0 launches nothing."""
        if all(self.grid):
            options = {"num_warps": self.warps, "num_stages": self.stages}
            self.kernel[self.grid](**self.arguments, **self.constants, **options)


_library = torch.library.Library("parallelformers_ng", "FRAGMENT")


def operator(schema: str, launches: Callable[..., tuple[Sequence[Launch], Any]]) -> Any:
    """Register and return an operator, `torch.ops.parallelformers_ng.NAME`, that launches kernels.

    Dispatch modes of torch see a call of the operator and its tensors. `torch.library.custom_op` is not used, because
    it imports the compiler at its first call.

    Args:
        schema: name, arguments and results, in the form of torch's `native_functions.yaml`.
        launches: function of the operator's arguments; allocates the results, and returns the launches that write them,
            in order, and the results.
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


# Number of Triton programs that keep the largest cards busy: about four for each multiprocessor.
_PROGRAMS = 512


def splits_for(programs: int, most: int) -> int:
    """Return into how many parts, 1 to `most`, to split the work of each program to keep the largest cards busy."""
    return max(1, min(most, _PROGRAMS // max(1, programs)))
