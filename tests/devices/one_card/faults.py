"""Causes faults on one rank, at one step of `generate`. Ranks import this module with the objects that callers send."""

from __future__ import annotations

import os
import signal

import torch
from transformers import LogitsProcessor


def _kill(scores: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(scores: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(scores: torch.Tensor) -> None:
    raise ValueError("only here")


def _run_out(scores: torch.Tensor) -> None:
    torch.empty(2 * torch.cuda.get_device_properties(scores.device).total_memory, dtype=torch.uint8, device="cuda")


STRIKES = {"killed": _kill, "stopped": _stop, "raises": _raise, "out of memory": _run_out}


class Fault(LogitsProcessor):
    """A processor that strikes in one process, at one length of the sequence."""

    def __init__(self, kind: str, pid: int, length: int) -> None:
        self.kind, self.pid, self.length = kind, pid, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if (os.getpid(), input_ids.shape[1]) == (self.pid, self.length):
            STRIKES[self.kind](scores)
        return scores
