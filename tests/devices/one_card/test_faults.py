"""Tests 20 faults of ranks that share one card over NCCL: errors, next answers, memory and processes."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelformers_ng import RequestTimeoutError, WorkerDiedError, WorkerError, deadline, parallelize
from parallelformers_ng.model.parallelized import deployment_of
from tests.devices.one_card.expected import greedy, without_ties
from tests.devices.one_card.faults import STRIKES, Fault
from tests.devices.one_card.place import CARD, Place
from tests.helpers.cancelling_streamer import Cancels
from tests.helpers.patience import PROMPTLY, RESTART_SECONDS, await_end, kill, workers_of
from tests.zoo.case import VOCABULARY
from tests.zoo.decoders import decoder

TOKENS, MANY_TOKENS = 6, 48
MAX_GROWTH = 1 << 20
"""Bytes on a device that may remain after a fault: the tiny model's cache has less than a tenth of them."""


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        kind: key of STRIKES, or a fault that the caller causes.
        rank: rank on which the fault strikes.
        step: step of `generate` at which it strikes; recordings compute the later steps.
        seconds: time until the caller causes the fault.
        raises: type of the caller's exception; None if the fault is between calls.
        restarts: whether the workers must restart.
    """

    kind: str
    raises: type[BaseException] | None
    rank: int = 0
    step: int = 0
    seconds: float = 0.0
    restarts: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.rank}-{self.step}-{self.seconds:g}"


CASES = [
    *(Case("killed", WorkerDiedError, rank, step, restarts=True) for rank, step in ((1, 2), (0, 0), (1, 5))),
    Case("killed while idle", None, 0, restarts=True),
    *(Case("stopped", RequestTimeoutError, rank, 3, restarts=True) for rank in (0, 1)),
    *(Case("raises", ValueError, rank, step) for rank, step in ((0, 0), (1, 1), (0, 3), (1, 5))),
    *(Case("out of memory", torch.OutOfMemoryError, rank, step) for rank, step in ((0, 1), (1, 0), (1, 4))),
    *(Case("deadline", RequestTimeoutError, seconds=seconds, restarts=True) for seconds in (0.1, 0.25)),
    *(Case("Ctrl-C", KeyboardInterrupt, seconds=seconds) for seconds in (0.05, 0.2, 0.3)),
    Case("wrong id", IndexError),
    Case("cancelled", InterruptedError, step=3),
]
QUICK = {"killed-1-2-0", "raises-1-1-0", "Ctrl-C-0-0-0.2", "out of memory-1-4-0"}
PLACES = [("card", CARD.marks), ("pretended", ())]


def _cases() -> list[Any]:
    """Return each case on a card. On a pretended device, return the quick cases, and as slow tests one of each kind."""
    one_of_each_kind = {case.kind: case for case in reversed(CASES)}.values()
    return [
        pytest.param(name, case, marks=[*marks, *([pytest.mark.slow] * (not marks and str(case) not in QUICK))])
        for name, marks in PLACES
        for case in CASES
        if marks or str(case) in QUICK or case in one_of_each_kind
    ]


@dataclass
class Deployed:
    """A model on two ranks.

    Attributes:
        errors: file of the standard error of the first ranks.
        bytes_before: bytes that each rank has allocated between two calls, before the first fault.
        workers_before: number of processes that this process has started for ranks, before the first fault.
    """

    model: Any
    place: Place
    inputs: Any
    want: torch.Tensor
    errors: Any
    bytes_before: list[int] = field(default_factory=list)
    workers_before: int = 0

    def answer_is_right(self) -> bool:
        return torch.equal(greedy(self.model, self.inputs, TOKENS), self.want)

    def group(self) -> Any:
        return deployment_of(self.model).replicas[0].ready(time.monotonic() + RESTART_SECONDS)[0]

    def bytes_now(self) -> list[int]:
        """Return the bytes that each rank has allocated, after calls that fill its caches."""
        assert self.answer_is_right()
        assert self.answer_is_right()
        return self.place.bytes_allocated(self.group())


@pytest.fixture(scope="module")
def _deployed() -> Iterator[dict[Place, Deployed]]:
    deployed: dict[Place, Deployed] = {}
    yield deployed
    for each in deployed.values():
        pids = deployment_of(each.model).pids
        each.model.deparallelize()
        await_end(*pids)


@pytest.fixture
def deployed(place: Place, _deployed: dict[Place, Deployed]) -> Deployed:
    """Return a model on two ranks, which all tests of this file share."""
    if place not in _deployed:
        _deployed[place] = _deploy(place)
    return _deployed[place]


def _deploy(place: Place) -> Deployed:
    inputs, want = without_ties(decoder("Llama"), TOKENS)
    errors, standard_error = tempfile.NamedTemporaryFile(), os.dup(2)  # noqa: SIM115
    os.dup2(errors.fileno(), 2)
    try:
        workers = place.workers(2, host_copy=True, max_restarts=len(CASES))
        model = parallelize(decoder("Llama"), 2, workers=workers, decode="cuda_graphs", progress=False)
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
    deployed = Deployed(model, place, inputs, want, errors)
    deployed.bytes_before = deployed.bytes_now()
    deployed.workers_before = len(workers_of(os.getpid()))
    return deployed


def _cause(case: Case, deployed: Deployed) -> None:
    """Run a call with the fault."""
    arguments = {name: tensor.clone() for name, tensor in deployed.inputs.items()}
    pid = deployment_of(deployed.model).pids[case.rank]
    if case.kind in STRIKES:
        fault = Fault(case.kind, pid, arguments["input_ids"].shape[1] + case.step)
        more = {"timeout": 2.0} if case.kind == "stopped" else {}
        greedy(deployed.model, arguments, TOKENS, logits_processor=[fault], **more)
    elif case.kind == "wrong id":
        arguments["input_ids"][1, 3] = VOCABULARY + 5
        greedy(deployed.model, arguments, TOKENS)
    elif case.kind == "cancelled":
        greedy(deployed.model, arguments, TOKENS, streamer=Cancels(case.step))
    elif case.kind == "deadline":
        with deadline(case.seconds):
            greedy(deployed.model, arguments, MANY_TOKENS, min_new_tokens=MANY_TOKENS)
    elif case.kind == "Ctrl-C":
        timer = threading.Timer(case.seconds, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        while True:  # the interrupt comes during a call, however fast the device is
            greedy(deployed.model, arguments, MANY_TOKENS, min_new_tokens=MANY_TOKENS)
    else:
        kill(pid)


@pytest.mark.parametrize(("place", "case"), _cases(), indirect=["place"], ids=str)
def test_fault_leaves_the_next_answer_right(case: Case, deployed: Deployed) -> None:
    deployed.group()  # the workers have restarted after the fault before
    incarnation = deployment_of(deployed.model).incarnation
    begun = time.monotonic()
    if case.raises is None:
        _cause(case, deployed)
    else:
        with pytest.raises(case.raises) as caught:
            _cause(case, deployed)
        if isinstance(caught.value, WorkerError) and case.kind in STRIKES:
            assert caught.value.rank == case.rank
    assert time.monotonic() - begun < PROMPTLY
    assert deployed.answer_is_right()
    assert deployment_of(deployed.model).incarnation == incarnation + case.restarts
    grown = [now - before for now, before in zip(deployed.bytes_now(), deployed.bytes_before, strict=True)]
    assert max(grown) <= MAX_GROWTH
    assert len(workers_of(os.getpid())) == deployed.workers_before
    assert "ProcessGroupNCCL" not in Path(deployed.errors.name).read_text()
