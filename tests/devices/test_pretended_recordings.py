"""Tests recorded steps on pretended CUDA devices, before and after failed requests: see `tests/pretend_cuda`.

Each test follows the sources of torch and NCCL; `tests/pretend_cuda/contract.py` names the places.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.errors import RequestCancelledError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.caller import TARGET, small
from tests.pretend_cuda.objects import Breaks, RaisesOn
from tests.zoo.case import VOCABULARY, text_inputs, token_ids
from tests.zoo.decoders import gpt2

STEPS = 6
HOW: dict[str, Any] = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}


def mistype(model: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_new_tokns"):
        model.generate(**text_inputs(), **HOW, max_new_tokns=3)


def give_a_bad_id(model: Any) -> None:
    ids = token_ids()
    ids[1, 3] = VOCABULARY
    with pytest.raises(IndexError, match=f"id {VOCABULARY}"):
        model.generate(ids, **HOW)


def cancel(model: Any) -> None:
    class Stops:
        def put(self, value: torch.Tensor) -> None:
            if value.ndim == 1:
                raise RequestCancelledError("enough")

        def end(self) -> None:
            pass

    with pytest.raises(RequestCancelledError):
        model.generate(**text_inputs(), **HOW, streamer=Stops())


FAILURES: dict[str, Callable[[Any], None]] = {"mistyped": mistype, "bad id": give_a_bad_id, "cancelled": cancel}


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_on_all_ranks_fails_one_request(failure: str, pretended: WorkerGroup) -> None:
    """The group aborts no exchange: NCCL stays connected, and recordings stay in use."""
    whole = small()
    want = whole.generate(**text_inputs(), **HOW)
    with parallelize(small(), workers=pretended) as model:
        assert torch.equal(model.generate(**text_inputs(), **HOW), want)
        connections, graphs = pretended.call("connections"), pretended.call("live_graphs")
        assert graphs == 1
        for _ in range(2):
            FAILURES[failure](model)
            pretended.call("graphs")
            assert torch.equal(model.generate(**text_inputs(), **HOW), want)
            assert pretended.call("graphs") == (0, STEPS - 1)
        assert (pretended.call("connections"), pretended.call("live_graphs")) == (connections, graphs)


def test_late_error_of_one_rank_fails_alone(pretended: WorkerGroup) -> None:
    connections = pretended.call("connections")
    for _ in range(2):
        with pytest.raises(ValueError, match="for nobody"):
            pretended.call("fail_alone")
        assert pretended.call("ping") == [0, 1]
    assert pretended.call("connections") == connections


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", [9, 12])
def test_abort_waits_for_no_recording(rank: int, at: int, pretended: WorkerGroup) -> None:
    whole = small().generate(**text_inputs(), **HOW)
    with parallelize(small(), workers=pretended) as model:
        assert torch.equal(model.generate(**text_inputs(), **HOW), whole)
        connections = pretended.call("connections")
        with pytest.raises(ValueError, match="only here"):
            model.generate(**text_inputs(), **HOW, stopping_criteria=[RaisesOn(pretended.pids[rank], at)])
        assert torch.equal(model.generate(**text_inputs(), **HOW), whole)
        assert (pretended.call("connections"), pretended.call("live_graphs")) == (connections + 1, 1)


def test_group_with_live_recordings_ends(pretended: WorkerGroup) -> None:
    """The end of a group waits for an abort that has begun."""
    with WorkerGroup(2, "cuda", target=TARGET, timeout=20) as group:
        model = parallelize(small(), workers=group)
        model.generate(**text_inputs(), **HOW)
        group._processes.arena.abort("for a test")
        begun = time.monotonic()
        with pytest.raises(Exception, match="for a test"):
            model.generate(**text_inputs(), **HOW)
    assert time.monotonic() - begun < 15


def test_watchdog_of_torch_leaves_the_process_alone(pretended: WorkerGroup, monkeypatch: Any) -> None:
    """After an NCCL error, torch's watchdog would wait, and then end a process that has been reset in the meantime."""
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "50")
    with WorkerGroup(2, "cuda", target=TARGET, timeout=20) as group, parallelize(small(), workers=group) as model:
        want = model.generate(**text_inputs(), **HOW)
        with pytest.raises(Exception, match="remote process exited"):
            model.generate(**text_inputs(), **HOW, stopping_criteria=[Breaks(group.pids[1], 9)])
        assert torch.equal(model.generate(**text_inputs(), **HOW), want)
        time.sleep(0.6)
        assert torch.equal(model.generate(**text_inputs(), **HOW), want)
        assert group.call("environment", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"]) == [
            "0",
            "0",
        ]


@pytest.mark.parametrize("failure", FAILURES)
def test_recordings_do_not_write_into_freed_memory(failure: str, pretended_one: WorkerGroup) -> None:
    """Recordings note the ids that they look up; a replay that wrote elsewhere would fail its request."""
    with parallelize(small(), workers=pretended_one) as model:
        want = model.generate(**text_inputs(), **HOW)
        FAILURES[failure](model)
        assert torch.equal(model.generate(**text_inputs(), **HOW), want)


def test_recordings_catch_bad_ids_after_a_failure(pretended_one: WorkerGroup) -> None:
    """A recorded step looks up a position beyond the model's table."""
    ids = token_ids(rows=1, length=64 - 4)
    with parallelize(gpt2(), workers=pretended_one, decode="cuda_graphs") as model:
        model.generate(ids, **{**HOW, "max_new_tokens": 5, "min_new_tokens": 5})
        give_a_bad_id(model)
        pretended_one.call("graphs")
        with pytest.raises(IndexError, match=r"id 64, vocabulary of 64"):
            model.generate(ids, **HOW)
        assert pretended_one.call("graphs")[1] > 0


def test_longer_cache_replaces_the_last_one(pretended_one: WorkerGroup) -> None:
    """The longer cache reuses the device memory of the last cache, because the memory cannot hold both caches."""
    whole, ids = small(), token_ids(length=250)
    short, long = ({"max_new_tokens": new, "min_new_tokens": new, "do_sample": False} for new in (4, 8))
    with parallelize(small(), workers=pretended_one, decode="cuda_graphs") as model:
        before = pretended_one.call("reserved")
        model.generate(ids, **short)
        first = pretended_one.call("reserved") - before
        model.generate(ids, **long)
        second = pretended_one.call("reserved") - before
        assert second < 1.8 * first  # first 256 positions, then 384 in the same memory
        assert torch.equal(model.generate(ids, **long), whole.generate(ids, **long))
        assert pretended_one.call("static_caches") == pretended_one.call("live_graphs") == 1


def test_out_of_memory_frees_memory_for_others(pretended_one: WorkerGroup) -> None:
    whole, ids = small(), token_ids(length=20)
    want = whole.generate(ids, **HOW)
    with parallelize(small(), workers=pretended_one, decode="cuda_graphs") as model:
        before = pretended_one.call("reserved")
        for length in (20, 200):
            model.generate(token_ids(length=length), **HOW)
        taken = pretended_one.call("reserved")
        pretended_one.call("limit", 100_000)
        try:
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                model.generate(token_ids(rows=64, length=120), **HOW)
            assert pretended_one.call("live_graphs") == 0
            assert pretended_one.call("reserved") < before + (taken - before) / 4
            assert torch.equal(model.generate(ids, **HOW), want)
        finally:
            pretended_one.call("limit", None)


def test_memory_is_unchanged_by_faults(pretended: WorkerGroup) -> None:
    with parallelize(small(), workers=pretended) as model:
        taken = []
        for _ in range(4):
            for failure in FAILURES.values():
                failure(model)
            with pytest.raises(ValueError, match="only here"):
                model.generate(**text_inputs(), **HOW, stopping_criteria=[RaisesOn(pretended.pids[1], 10)])
            model.generate(**text_inputs(), **HOW)
            taken.append(pretended.call("reserved", collect=True))
        assert len(set(taken)) == 1
        assert deployment_of(model).incarnation == 0
