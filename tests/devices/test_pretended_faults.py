"""Tests failures on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.chaos_devices import faults
from parallelformers_ng import parallelize
from parallelformers_ng.collectives.nccl import nccl_defaults
from parallelformers_ng.errors import (
    CollectiveAbortedError,
    PlacementError,
    RequestTimeoutError,
    StartupError,
    WorkerDiedError,
    WorkerError,
)
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.preload import IMPORTS
from tests.pretend_cuda import process_group, stubs
from tests.pretend_cuda.caller import TARGET, small
from tests.pretend_cuda.faults import KINDS, HangingDevice
from tests.pretend_cuda.objects import RaisesOn
from tests.zoo.case import VOCABULARY, text_inputs, token_ids
from tests.zoo.decoders import gpt2

GREEDY = {"max_new_tokens": 3, "do_sample": False}


def test_token_id_out_of_range_fails_alone(pretended: WorkerGroup) -> None:
    whole = small().generate(**text_inputs(), **GREEDY)
    with parallelize(small(), workers=pretended) as model:
        for bad, call in ((VOCABULARY, model), (-1, model), (1 << 40, partial(model.generate, max_new_tokens=2))):
            ids = token_ids()
            ids[1, 3] = bad
            with pytest.raises(IndexError, match=f"id {bad}, vocabulary of {VOCABULARY}$"):
                call(input_ids=ids)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole)


def test_position_out_of_range_fails_alone(pretended: WorkerGroup) -> None:
    """The position embedding is replicated, so each rank reads it without an exchange."""
    with parallelize(gpt2(), workers=pretended) as model:
        with pytest.raises(IndexError, match=r"id 64, vocabulary of 64$"):
            model(input_ids=token_ids(length=65))
        assert model(input_ids=token_ids(length=64)).logits.isfinite().all()


def test_nccl_with_a_device_twice_is_refused(pretended: WorkerGroup) -> None:
    with pytest.raises(PlacementError, match=r"device_ids \[0, 0\] name a device twice"):
        parallelize(small(), workers={"device": "cuda", "device_ids": [0, 0]})


@pytest.mark.slow
def test_ranks_that_share_a_device(pretended: WorkerGroup) -> None:
    workers = {"device": "cuda", "device_ids": [1, 1], "backend": "shared_memory"}
    with parallelize(small(), workers=workers) as model:
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), small().generate(**text_inputs(), **GREEDY))
        assert set(model.memory_allocated()) == {"cuda:1"}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_error_names_the_rank_that_raised(rank: int, pretended: WorkerGroup) -> None:
    """The aborted exchange leaves data on the device. The peer must not report that ranks have diverged."""
    with parallelize(small(), workers=pretended) as model:
        criteria = [RaisesOn(pretended.pids[rank], 9)]
        with pytest.raises(ValueError, match="only here") as caught:
            model.generate(**text_inputs(), stopping_criteria=criteria, **GREEDY)
        assert isinstance(caught.value, WorkerError)
        assert caught.value.rank == rank
        whole = small().generate(**text_inputs(), **GREEDY)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole)


@pytest.mark.parametrize(("mishap", "cause"), [("raise", "unhandled system error"), ("sum", "sums to 1.5 on cuda:")])
def test_nccl_is_tried_at_the_start(mishap: str, cause: str, pretended: WorkerGroup, monkeypatch: Any) -> None:
    monkeypatch.setenv(process_group.MISHAP, mishap)
    with pytest.raises(StartupError, match=f"connecting to its peers by NCCL: .*{cause}.*NCCL_DEBUG=INFO.*--shm-size"):
        WorkerGroup(2, "cuda", target=TARGET, start_timeout=60)


def test_nccl_hang_names_its_remedy(pretended: WorkerGroup, monkeypatch: Any) -> None:
    """The hang is endless: a rank waits for a sum that never comes."""
    monkeypatch.setenv(process_group.MISHAP, "hang")
    place = r"\(.*process_group\.py, line \d+\)"
    says = f"within 6 s; it was connecting to its peers by NCCL {place}.*NCCL_P2P_DISABLE=1"
    with pytest.raises(StartupError, match=says):
        WorkerGroup(2, "cuda", target=TARGET, start_timeout=6)


def test_rank_that_waits_for_its_device_is_named(pretended: WorkerGroup) -> None:
    with WorkerGroup(2, "cuda", target=TARGET, imports=IMPORTS, timeout=60) as group:
        model = parallelize(small(), workers=group)
        processors = [HangingDevice(group.pids[1])]
        with pytest.raises(RequestTimeoutError) as caught:
            model.generate(**text_inputs(), **GREEDY, logits_processor=processors, timeout=8)
    assert "The request was running on the ranks: run(generate(" in str(caught.value)
    waits = str(caught.value).partition("\nrank 1 ")[2]
    assert "runs 'run'" in waits
    assert re.search(r"^  .*pretend_cuda/streams\.py, line \d+, in host_waits$", waits, re.MULTILINE)
    assert re.search(r"^  .*parallelformers_ng/generation/\w+\.py, line \d+, in ", waits, re.MULTILINE)


def test_one_rank_does_without_nccl(pretended: WorkerGroup, monkeypatch: Any) -> None:
    monkeypatch.setenv(process_group.MISHAP, "hang")
    with WorkerGroup(1, "cuda", target=TARGET, start_timeout=60) as group:
        assert group.call("ping") == [0]


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (
            "1",
            r"CUDA does not have cuda:1: CUDA error: invalid device ordinal\. The driver lists 4 .* CUDA has 1\..*MIG-",
        ),
        ("old", r"CUDA cannot be used on cuda:[01]: The NVIDIA driver .* is too old .*lists 4 devices; .*newer driver"),
    ],
)
def test_devices_known_to_nvml_only_are_refused(
    driver: str, said: str, pretended: WorkerGroup, monkeypatch: Any
) -> None:
    monkeypatch.setenv(stubs.DRIVER, driver)
    with pytest.raises(StartupError, match=f"(?s)raised while preparing cuda:[01]: StartupError: {said}"):
        parallelize(small(), 2, workers={"device": "cuda"})


def test_nccl_is_tried_after_a_failure(pretended: WorkerGroup) -> None:
    """After a failure, ranks try NCCL. If the trial fails, the rank exits and its peers do not wait."""
    with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
        with pytest.raises(ValueError, match="for once"):
            group.call("fail_once", "for once")
        assert group.call("connections") == 2
        with pytest.raises(ValueError, match="for once"):
            group.call("fail_once", "for once", mishap=True)
        with pytest.raises(WorkerDiedError):
            group.call("connections")


def test_nccl_stays_on_this_machine_by_default(pretended: WorkerGroup, monkeypatch: Any) -> None:
    names = ["NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE", "TORCH_FR_BUFFER_SIZE"]
    assert pretended.call("environment", names) == ["=lo", "0", "0"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
        assert group.call("environment", names) == ["eth1", "0", "0"]
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20", "NCCL_ASYNC_ERROR_HANDLING": "1"}
    left = nccl_defaults(environment)
    assert [*left][:2] == names[:2]
    assert not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} & left.keys()


def test_no_recording_runs_after_an_abort(pretended: WorkerGroup) -> None:
    with pytest.raises(CollectiveAbortedError, match="a peer gave up"):
        pretended.call("launch_after_abort")


IN_PLACE = [name for name, kind in KINDS.items() if not kind.restarts]


@pytest.mark.parametrize("kinds", [IN_PLACE, ["sticky error"], pytest.param([*KINDS], marks=pytest.mark.slow)], ids=len)
def test_every_kind_of_fault_is_handled(kinds: list[str], pretended: WorkerGroup) -> None:
    report = faults(len(kinds), seed=1, kinds=kinds)
    assert (report.untrue, report.unrecovered, report.hung, report.needless) == ([], [], 0, 0)
    assert set(report.grown) <= {0}
    # A sticky error restarts the group, and the first answer after a restart waits for no recordings.
    assert (report.replays == 0) == (kinds == ["sticky error"])
