"""Tests faults during `parallelize`: the error comes in time, and the model is unchanged."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng import parallelize, start_group
from parallelformers_ng.errors import GroupError, RequestTimeoutError, StartupError, WorkerDiedError
from parallelformers_ng.model import deployment
from parallelformers_ng.runtime import forks, startup
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.worker_process import WorkerProcess
from tests.helpers.patience import PROMPTLY
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, WorkerDiedError), (signal.SIGSTOP, RequestTimeoutError)])
def test_fault_during_transfer_leaves_the_model_unchanged(number, kind, monkeypatch):
    """A stopped rank simulates a disk that does not respond."""
    model, original = gpt2(), deployment.hand_over
    with torch.no_grad():
        want = model(**text_inputs()).logits
    moments = []

    def hand_over_and_strike(*args: Any) -> None:
        original(*args)
        os.kill(group.pids[1], number)
        moments.append(time.monotonic())
        group.timeout = 1.0

    monkeypatch.setattr(deployment, "hand_over", hand_over_and_strike)
    with start_group(2, device="cpu", timeout=60) as group, pytest.raises(kind):
        parallelize(model, workers=group)
    assert time.monotonic() - moments[0] < PROMPTLY
    with torch.no_grad():
        assert torch.equal(model(**text_inputs()).logits, want)


@pytest.mark.parametrize(
    ("number", "pattern", "limit"),
    [
        (signal.SIGKILL, "rank 1 ended while (importing|building|connecting).*: signal 9", 60.0),
        (signal.SIGSTOP, r"not ready within 1 s; it was.*start_timeout=; the load of this machine is \d", 1.0),
    ],
)
@pytest.mark.parametrize("forked", [True, False])
def test_a_fault_while_starting_is_named_in_time(number, pattern, limit, forked, monkeypatch):
    if not forked:
        monkeypatch.setenv(forks.SWITCH, "0")
    await_ready, moments = startup.await_ready, []

    def strike_and_await(workers: list[WorkerProcess], *rest: Any) -> None:
        workers[1].await_start(time.monotonic() + 60)
        os.kill(workers[1].pid, number)
        moments.append(time.monotonic())
        await_ready(workers, *rest)

    monkeypatch.setattr(startup, "await_ready", strike_and_await)
    with pytest.raises(StartupError, match=pattern):
        WorkerGroup(2, target="tests.helpers.runtime_target:NeverReady", threads=1, start_timeout=limit)
    assert time.monotonic() - moments[0] < PROMPTLY


def test_group_of_another_process_is_refused(groups):
    group, model = groups(1), gpt2()
    child = os.fork()
    if child == 0:
        try:
            parallelize(model, workers=group)
        except GroupError as error:
            os._exit(7 if "must parallelize the model itself" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


class FailsToCopy(nn.Module):
    """A module that can be pickled but not rebuilt: the start fails in the workers."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise LookupError("nothing to build from")


def test_failed_start_leaves_the_model_unchanged(monkeypatch):
    model = gpt2()
    with torch.no_grad():
        want = model(**text_inputs()).logits
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    model.transformer.extra = FailsToCopy()
    with pytest.raises(LookupError, match="nothing to build from"):
        parallelize(model, 2, workers={"device": "cpu"})
    del model.transformer.extra
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    monkeypatch.setenv(forks.SWITCH, "0")  # a fork could be ready too soon
    with pytest.raises(StartupError, match="not ready within"):
        parallelize(model, 2, workers={"device": "cpu", "start_timeout": 0.05})
    with torch.no_grad():
        assert torch.equal(model(**text_inputs()).logits, want)
