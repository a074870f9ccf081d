"""Tests pretended CUDA devices on several simulated hosts: see `tests/pretend_cuda` and `simulated_hosts`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from parallelformers_ng import parallelize
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.spanning import HandedOver, SpanningNcclCommunicator, interface_of
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import CollectiveAbortedError, PlacementError, StartupError, WorkerDiedError
from parallelformers_ng.hosts import agent
from parallelformers_ng.hosts.hosts import Hosts
from parallelformers_ng.hosts.launcher_choice import Elsewhere
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import await_incarnation, kill
from tests.helpers.saved_model import save_tiny_model
from tests.helpers.simulated_hosts import SimulatedHosts
from tests.hosts.test_torchrun import job
from tests.pretend_cuda import process_group
from tests.pretend_cuda.caller import TARGET, believe
from tests.pretend_cuda.objects import RaisesOn

IDS = torch.arange(1, 8)[None]
HOW: dict[str, Any] = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}


def started(*counts: int, **options: Any) -> WorkerGroup:
    arguments = {"target": TARGET, "threads": 1, "timeout": 60, **options}
    return WorkerGroup(sum(counts), "cuda", hosts=lambda: Hosts(SimulatedHosts(*counts)), **arguments)


@pytest.fixture(scope="module")
def believing() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        believe(patch)
        yield patch


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.fixture(scope="module")
def group(believing: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    """Yield a group with two ranks on one host, one on another, and NCCL between all."""
    with started(2, 1) as group:
        yield group


def check(model: Any, whole: Any) -> None:
    assert torch.allclose(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(IDS, **HOW), whole.generate(IDS, **HOW))


def test_nccl_connects_all_ranks_over_signed_connections(group: WorkerGroup, path: Path, whole: Any) -> None:
    with parallelize(path, workers=group, progress=False) as model:
        check(model, whole)
        assert group.call_each("connections", [()]) == [1, 1, 1]
        assert set(model.memory_allocated()) == {"cuda:0 on host-0", "cuda:1 on host-0", "cuda:0 on host-1"}
        assert "GPU:0 on host-1 => " in model.memory_summary()
        weights = group.call_each("devices", [()])
        assert weights == [{"cuda:0"}, {"cuda:1"}, {"cuda:0"}]


@pytest.mark.parametrize("rank", [0, 2])
def test_error_on_one_host_frees_the_others(rank: int, group: WorkerGroup, path: Path, whole: Any) -> None:
    before = group.call("connections")
    with parallelize(path, workers=group, progress=False) as model:
        with pytest.raises(ValueError, match="only here") as caught:
            model.generate(IDS, stopping_criteria=[RaisesOn(group.pids[rank], 9)], **HOW)
        assert caught.value.rank == rank  # type: ignore[attr-defined]
        check(model, whole)
    assert group.call("connections") == before + 1


@pytest.mark.parametrize("absent", [1, 2])
def test_ranks_connect_again_after_one_raised(absent: int, believing: pytest.MonkeyPatch) -> None:
    with started(2, 1) as group:
        with pytest.raises(ValueError, match="not today"):
            group.call("connect_alone", absent)
        assert group.call_each("connect_alone", [(-1,)]) == [1, 1, 1]


def test_stages_across_hosts_have_own_communicators(believing: pytest.MonkeyPatch, path: Path, whole: Any) -> None:
    with started(2, 2) as group:
        fit = {"strategy": "tensor+pipeline"}  # as many ranks in each stage as on each host
        with parallelize(path, workers=group, fit=fit, progress=False) as model:
            check(model, whole)
            assert group.call_each("connections", [()]) == [2, 2, 2, 2]
            with pytest.raises(ValueError, match="only here"):
                model.generate(IDS, stopping_criteria=[RaisesOn(group.pids[3], 9)], **HOW)
            check(model, whole)
            assert group.call_each("connections", [()]) == [4, 4, 4, 4]


def test_sums_without_nccl_go_through_hosts(believing: pytest.MonkeyPatch, path: Path, whole: Any) -> None:
    with (
        started(1, 2, backend="shared_memory") as group,
        parallelize(path, workers=group, progress=False) as model,
    ):
        check(model, whole)
        assert group.call("connections") == 0


def test_nccl_is_restricted_to_the_clusters_interface(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"]
    assert group.call_each("environment", [(names,)]) == [["=lo", "0"]] * 3
    monkeypatch.setenv(names[0], "eth1")
    with started(1, 1) as other:
        assert other.call_each("environment", [(names,)]) == [["eth1", "0"]] * 2


def test_nccl_without_such_an_interface_is_refused(believing: pytest.MonkeyPatch) -> None:
    init = agent._Agent.__init__

    def elsewhere(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._here = "192.0.2.1"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent._Agent, "__init__", elsewhere)
        with pytest.raises(StartupError, match=r"no network interface of this machine has the address 192\.0\.2\.1"):
            started(1, 1)


def test_value_of_one_rank_reaches_the_others() -> None:
    value = bytes(range(128))

    def meet(communicator: Communicator) -> None:
        own = HandedOver(communicator, 1)
        for _ in range(2):
            store = torch.distributed.PrefixStore("0", own)
            if communicator.rank == 1:
                store.set("0", value)  # type: ignore[arg-type]
                own.set("exception_dump", b"torch's watch has seen an error")
            else:
                assert store.get("0") == value
            assert not own.check(["exception_dump"])
        assert communicator.all_reduce(torch.ones(1)).item() == 3

    run_ranks(3, meet)


def test_interface_is_that_of_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    if socket.has_ipv6 and Path("/proc/net/if_inet6").read_text():
        assert interface_of("::1") == "lo"
    with pytest.raises(StartupError, match=r"no network interface .* address 192\.0\.2\.1, .* set NCCL_SOCKET_IFNAME"):
        interface_of("192.0.2.1")


def test_rank_that_cannot_connect_names_its_host(believing: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(process_group.MISHAP, "sum")
        with pytest.raises(StartupError, match=r"host host-\d: rank \d raised .* sums to 1.5 on cuda:0"):
            started(1, 1)


def test_a_host_with_too_few_devices_is_named(believing: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"host host-1 has 4 CUDA devices for 5 ranks"):
        started(1, 5)


@pytest.mark.slow
def test_torchrun_ranks_get_devices_of_their_place(believing: pytest.MonkeyPatch, path: Path, whole: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        job(patch)
        with parallelize(path, progress=False) as model:
            check(model, whole)
            assert set(model.memory_allocated()) == {"cuda:0", "cuda:1"}
            assert deployment_of(model).replicas[0].group.call("environment", ["NCCL_SOCKET_IFNAME"]) == ["=lo"]


@pytest.mark.parametrize("exchange", ["sum", "gather"])
def test_ranks_wait_for_cause_when_nccl_fails(monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    """NCCL may fail on one host before the host is informed why a peer on another host has aborted."""

    def fails(*_: Any) -> Any:
        raise dist.DistBackendError("remote process exited")

    reasons: list[str] = []
    ranks = object.__new__(SpanningNcclCommunicator)
    monkeypatch.setattr(SpanningNcclCommunicator, "abort", lambda _, reason: reasons.append(reason))
    ranks.rank, ranks._trace, ranks._small = 1, 0, None
    ranks._arena, ranks._entering = SimpleNamespace(aborted=False), threading.Lock()  # type: ignore[assignment]
    ranks._group = SimpleNamespace(allreduce=fails, _allgather_base=fails)
    with pytest.raises(CollectiveAbortedError, match="rank 1: NCCL failed: remote process exited"):
        ranks.sum(torch.zeros(1)) if exchange == "sum" else ranks._gather_into(torch.zeros(2), torch.zeros(1))
    assert reasons == ["rank 1: NCCL failed: remote process exited"]


def test_a_loaded_model_is_refused(group: WorkerGroup, whole: Any) -> None:
    with pytest.raises(PlacementError, match=r"host-0, host-1: the model is loaded in this process\. Pass a path"):
        parallelize(whole, workers=group)


def test_dead_rank_is_named_and_weights_reread(believing: pytest.MonkeyPatch, path: Path, whole: Any) -> None:
    simulated: list[SimulatedHosts] = []

    def hosts(_: int) -> Hosts:
        simulated.append(SimulatedHosts(1, 1))
        return Hosts(simulated[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallelformers_ng.model.groups.elsewhere", lambda *_: Elsewhere(hosts, 2, 4, lambda *_: 1))
        model = parallelize(path, 2, workers={"device": "cuda"}, progress=False)
    with model:
        check(model, whole)
        group = deployment_of(model).replicas[0].group
        kill(group.pids[1])
        with pytest.raises(WorkerDiedError, match=r"rank 1 \(pid \d+, cuda:0\) on host host-1 died: signal 9"):
            group.call("connections")
        await_incarnation(model, 1)
        check(model, whole)
        assert len(simulated) == 2
