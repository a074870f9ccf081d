"""A rank on a pretended device whose Triton kernels run in Triton's interpreter. It counts what a step launches."""

from __future__ import annotations

import logging
from typing import Any

import torch

from parallelformers_ng.cuda_graphs import kernel_trial
from parallelformers_ng.kernels import step_kernels
from parallelformers_ng.kernels.step_kernels import StepKernels
from parallelformers_ng.kernels.triton import byte_product, nibble_product
from tests.kernels.triton.interpreter import interpret
from tests.pretend_cuda.kernels import CountingRunner
from tests.pretend_cuda.streams import order
from tests.pretend_cuda.worker import obstacle

interpret()
kernel_trial.REPLAYS = 1  # each takes seconds
byte_product._INPUTS_AT_ONCE, nibble_product._GROUPS_AT_ONCE = 16, 1  # products of 64 inputs have two splits
StepKernels.obstacle = obstacle  # type: ignore[method-assign]


class _Notes(logging.Handler):
    """Lines that trials of kernels wrote to the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.module == "kernel_trial":
            self.lines.append(record.getMessage())


_notes = _Notes()
kernel_trial.log.addHandler(_notes)
kernel_trial.log.setLevel(logging.INFO)


class InterpretingRunner(CountingRunner):
    """A rank whose decode steps are computed by the kernels."""

    def said_of_kernels(self) -> list[str]:
        """Return the lines that the log got of the kernels since the last call."""
        lines, _notes.lines = _notes.lines, []
        return lines

    def spoil_kernels(self, fault: str = "", rank: int | None = None) -> None:
        """Have the kernels fail from now on.

        Args:
            fault: "wrong", "slow", "old card", "no Triton", "no memory", "" for none.
            rank: the only rank with the fault; None for all.
        """
        fault = fault if rank in (None, self.rank) else ""
        order.kernel_cost = 1000 if fault == "slow" else 1
        torch.cuda.get_device_capability = lambda device=None: (7, 5) if fault == "old card" else (9, 0)
        step_kernels.find_spec = lambda name: None if fault == "no Triton" else name  # type: ignore[attr-defined]
        operators = step_kernels._operators()
        operators.gated = {"wrong": _doubled, "no memory": _no_room}.get(fault, torch.ops.parallelformers_ng.gated)


def _doubled(*arguments: Any) -> Any:
    return torch.ops.parallelformers_ng.gated(*arguments) * 1.1


def _no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nThe rest is advice.")
