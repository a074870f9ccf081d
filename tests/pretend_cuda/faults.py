"""Causes device faults by a processor on a rank. The module is separate, so that workers import no other test code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import DistBackendError
from transformers import LogitsProcessor

from parallelformers_ng.errors import RequestTimeoutError, WorkerDiedError
from tests.helpers.cancelling_streamer import Cancels
from tests.pretend_cuda import process_group
from tests.pretend_cuda.streams import order
from tests.zoo.case import VOCABULARY

LATE_SECONDS = 1.0


def _run_out(scores: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _look_beyond(scores: torch.Tensor) -> None:
    """Trigger an assertion on the device; afterwards no CUDA call works in the process."""
    scores.gather(1, torch.full((len(scores), 1), VOCABULARY, device=scores.device))


def _die(scores: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _break_nccl(scores: torch.Tensor) -> None:
    process_group.fail_next = True


def _come_late(scores: torch.Tensor) -> None:
    time.sleep(3 * LATE_SECONDS)


class HangingDevice(LogitsProcessor):
    """A processor after which the device of one process finishes no more work."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        order.hangs = os.getpid() == self.pid
        return scores


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        strikes: function that causes it on one rank, given the scores of a step. None: the request causes it, see
        `spoil`.
        raises: type of the caller's exception.
        says: part of the message.
        restarts: whether the workers must restart.
    """

    strikes: Callable[[torch.Tensor], None] | None
    raises: type[Exception]
    says: str
    restarts: bool = False


KINDS = {
    "mistyped keyword": Kind(None, ValueError, "max_new_tokns"),
    "cancellation": Kind(None, InterruptedError, "enough of it"),
    "bad id": Kind(None, IndexError, f"id {VOCABULARY + 5}, vocabulary of {VOCABULARY}"),
    "out of memory": Kind(_run_out, torch.OutOfMemoryError, "Tried to allocate"),
    "sticky error": Kind(_look_beyond, torch.AcceleratorError, "device-side assert", restarts=True),
    "kill": Kind(_die, WorkerDiedError, "signal 9", restarts=True),
    "NCCL error": Kind(_break_nccl, DistBackendError, "remote process exited"),
    "late rank": Kind(_come_late, RequestTimeoutError, "no answer from ranks", restarts=True),
}


def spoil(name: str, arguments: dict[str, Any], step: int) -> None:
    """Change the arguments of a request so that they cause this kind of fault, at a step of it."""
    if name == "bad id":
        arguments["input_ids"][1, 3] = VOCABULARY + 5
    elif name == "mistyped keyword":
        arguments["max_new_tokns"] = 3
    elif name == "cancellation":
        arguments["streamer"] = Cancels(step)
    elif name == "late rank":
        arguments["timeout"] = LATE_SECONDS


class Fault(LogitsProcessor):
    """A processor that strikes in one process, at one step."""

    def __init__(self, kind: str, pid: int, length: int) -> None:
        self.kind, self.pid, self.length = kind, pid, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        strikes = KINDS[self.kind].strikes
        if strikes is not None and (os.getpid(), input_ids.shape[1]) == (self.pid, self.length):
            strikes(scores)
        return scores
