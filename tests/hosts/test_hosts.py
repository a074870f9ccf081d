"""Tests groups over several hosts, which are simulated on this machine over the loopback interface."""

from __future__ import annotations

import argparse
import signal
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallelformers_ng import parallelize, save_sharded, start_group
from parallelformers_ng.checkpoint.loading import load_skeleton
from parallelformers_ng.checkpoint.reading import read_copy
from parallelformers_ng.cli import serve
from parallelformers_ng.errors import DivergedError, ParallelError, PlacementError, StartupError, WorkerDiedError
from parallelformers_ng.hosts import agent
from parallelformers_ng.hosts.hosts import Hosts
from parallelformers_ng.hosts.ray import bundle_of, ranks_of_each
from parallelformers_ng.model.groups import RUNNER
from parallelformers_ng.options import FitOptions, RayOptions
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving import run as serving_run
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.patience import await_end, kill
from tests.helpers.saved_model import save_tiny_model
from tests.helpers.simulated_hosts import SimulatedHosts

TARGET = "tests.helpers.hosts_target:HostsTarget"


def started(target, *counts):
    return WorkerGroup(sum(counts), target=target, threads=1, timeout=60, hosts=lambda: Hosts(SimulatedHosts(*counts)))


@pytest.fixture(scope="module")
def group():
    """Yield a group of three ranks that sum and fail on request."""
    with started(TARGET, 2, 1) as group:
        yield group


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(path):
    """Yield a model on three ranks of two hosts, and the same model whole."""
    with started(RUNNER, 1, 2) as group:
        cut = parallelize(path, workers=group, progress=False)
        yield cut, AutoModelForCausalLM.from_pretrained(path).eval()
        cut.deparallelize()


def test_all_ranks_run_rank_zero_answers(group):
    assert group.hosts.names == ["host-0", "host-1"]
    assert group.call("sum_of_ranks", 2.0) == 9.0
    assert group.call_each("own", [("a",), ("b",), ("c",)]) == [(0, "a"), (1, "b"), (2, "c")]
    large = torch.randn(1 << 20)
    assert torch.equal(group.call("echo", large), large)


def test_gathered_sums_equal_those_of_one_host(group):
    results = group.call_each("collect", [()])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    total, wide, gathered, of_two, either, nothing = results[0]
    assert total.tolist() == [[6.0, 6.0], [6.0, 6.0]]
    assert wide.dtype is torch.bfloat16
    assert torch.allclose(wide.float(), torch.tensor(0.3), rtol=1e-2)
    assert gathered.tolist() == [[0, 1, 1, 2, 2, 2]] * 2
    assert of_two.tolist() == [2, 2]
    assert either.tolist() == [True, False]
    assert nothing.numel() == 0


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_error_ends_all_sums_next_request_works(group, rank):
    with pytest.raises(ValueError, match="a bad value") as raised:
        group.call("raise_value_error", [rank])
    assert raised.value.rank == rank
    assert group.call("sum_of_ranks", 1.0) == 6.0


def test_ranks_in_different_sums_are_told_so(group):
    with pytest.raises(DivergedError):
        group.call("diverge")
    assert group.call("sum_of_ranks", 1.0) == 6.0


def test_a_request_is_cancelled_on_all_hosts(group):
    class StopError(Exception):
        pass

    def stop(_):
        raise StopError

    with pytest.raises(StopError):
        group.call("count", 10**9, on_event=stop)
    assert group.call("sum_of_ranks", 1.0) == 6.0


def test_dead_rank_ends_group_naming_its_host():
    group = started(TARGET, 1, 2)
    pids = group.pids
    kill(pids[2])
    with pytest.raises(WorkerDiedError, match=r"rank 2 .* on host host-1 died: signal 9") as raised:
        group.call("sum_of_ranks", 1.0)
    assert (raised.value.rank, raised.value.host, raised.value.signal) == (2, "host-1", signal.SIGKILL)
    group.close()
    await_end(*pids)


def test_lost_host_ends_group_and_is_named(monkeypatch):
    """In this test the agent closes its connection without a message, in the middle of a request."""
    agents = []
    init = agent._Agent.__init__

    def noted(self, *arguments):
        agents.append(self)
        init(self, *arguments)

    monkeypatch.setattr(agent._Agent, "__init__", noted)
    group = started(TARGET, 1, 1)
    pids = group.pids
    lost = next(each for each in agents if each._number == 1)
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* on host host-1 died: the host or its agent has") as raised:
        group.call("emit_and_sleep", 600, on_event=lambda _: lost._control.connection.shutdown(2))
    assert (raised.value.rank, raised.value.host, raised.value.exit_code) == (1, "host-1", None)
    group.close()
    await_end(*pids)


def test_failed_start_of_ranks_names_the_host():
    with pytest.raises(StartupError, match=r"host-(\d): rank \1 raised while importing"):
        started("tests.no_such_module:Target", 1, 1)


def test_agents_that_do_not_call_are_named():
    class Silent(SimulatedHosts):
        def _serve(self, number, deadline):
            if number == 0:
                super()._serve(number, deadline)

    with pytest.raises(StartupError, match=r"host 1 did not connect in time; start_timeout is 1 s"):
        WorkerGroup(2, target=TARGET, start_timeout=1, hosts=lambda: Hosts(Silent(1, 1)))


def test_hosts_with_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(agent, "VERSIONS", {**agent.VERSIONS, "torch": "1.0"})
    with pytest.raises(StartupError, match=r"host-\d has torch 1.0, and this process"):
        started(TARGET, 1, 1)


def test_model_from_path_equals_the_whole_one(pair):
    cut, whole = pair
    ids = torch.randint(1, 131, (2, 7))
    assert torch.allclose(cut(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
    for options in ({}, {"num_beams": 3}, {"do_sample": True}):
        torch.manual_seed(3)
        tokens = cut.generate(ids, max_new_tokens=6, pad_token_id=0, **options)
        torch.manual_seed(3)
        assert torch.equal(tokens, whole.generate(ids, max_new_tokens=6, pad_token_id=0, **options)), options


def test_caches_stay_on_the_hosts(pair):
    cut, whole = pair
    ids = torch.randint(1, 131, (1, 5))
    ours, theirs = cut(ids, use_cache=True), whole(ids, use_cache=True)
    more = torch.tensor([[7]])
    again = cut(more, past_key_values=ours.past_key_values)
    assert torch.allclose(again.logits, whole(more, past_key_values=theirs.past_key_values).logits, atol=1e-4)
    assert again.past_key_values.get_seq_length() == 6


def test_saving_over_hosts(pair, path, tmp_path):
    cut, whole = pair
    cut.save_pretrained(tmp_path / "whole")
    save_sharded(cut, tmp_path / "cut")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in whole.state_dict().items())
    again = load_skeleton(str(tmp_path / "cut")).state_dict()
    assert all(torch.equal(read_copy(again[name].node, {}), tensor) for name, tensor in whole.state_dict().items())


def test_loaded_model_is_refused_with_advice(path):
    with started(RUNNER, 1, 1) as group:
        model = AutoModelForCausalLM.from_pretrained(path)
        with pytest.raises(
            PlacementError, match=r"to the hosts host-0, host-1: the model is loaded in this process\. Pass a path"
        ):
            parallelize(model, workers=group)
        assert model.lm_head.weight.device.type == "cpu"


def test_loaded_model_goes_to_local_ranks(path):
    with started(RUNNER, 2) as group:
        whole = AutoModelForCausalLM.from_pretrained(path).eval()
        ids = torch.randint(1, 131, (2, 7))
        due = whole(ids).logits
        cut = parallelize(whole, workers=group, progress=False)
        assert torch.allclose(cut(ids).logits, due, atol=1e-4)
        cut.deparallelize()


def test_stages_across_hosts_sum_within_each(path):
    with started(RUNNER, 2, 2) as group:
        cut = parallelize(path, workers=group, fit={"strategy": "tensor+pipeline"}, progress=False)
        assert (cut.shard_plan.strategy, cut.shard_plan.stages) == ("tensor+pipeline", 2)
        whole = AutoModelForCausalLM.from_pretrained(path).eval()
        ids = torch.randint(1, 131, (2, 7))
        assert torch.allclose(cut(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
        tokens, due = (model.generate(ids, max_new_tokens=6, pad_token_id=0, do_sample=False) for model in (cut, whole))
        assert torch.equal(tokens, due)
        cut.deparallelize()


def test_stages_across_hosts_are_refused(path):
    with started(RUNNER, 1, 3) as group, pytest.raises(Exception, match="cannot be divided into stages of 2 ranks"):
        parallelize(path, workers=group, fit={"strategy": "tensor+pipeline", "tensor": 2}, progress=False)


@pytest.mark.parametrize(
    ("counts", "tensor", "message"),
    [
        ([8, 8], 8, None),
        ([2, 4, 2], 2, None),
        ([1, 1], None, r"hosts of \[1, 1\] ranks cannot be divided into equal stages of 2 or more"),
        ([3, 2], None, r"hosts of \[3, 2\] ranks cannot be divided into equal stages of 2 or more"),
        ([4], None, "give tensor=, the ranks of each stage"),
    ],
)
def test_default_stages_are_the_ranks_of_hosts(counts, tensor, message):
    fit = FitOptions("tensor+pipeline")
    if message is None:
        assert fit.over(counts).tensor == tensor
        assert FitOptions("tensor+pipeline", 3).over(counts).tensor == 3
        assert FitOptions().over(counts) == FitOptions()
    else:
        with pytest.raises(ParallelError, match=message):
            fit.over(counts).stages(sum(counts))


@pytest.mark.parametrize(
    ("device", "width", "bundle"),
    [
        ("cpu", 1, {"CPU": 2, "disk": 3}),
        ("cuda", 1, {"CPU": 2, "GPU": 1, "disk": 3}),
        ("cuda", 4, {"CPU": 8, "GPU": 4, "disk": 12}),
    ],
)
def test_bundle_fits_the_ranks_of_a_stage(device, width, bundle):
    assert bundle_of(RayOptions(cpus=2, resources={"disk": 3}), device, width) == bundle


@pytest.mark.parametrize(
    ("devices", "world_size", "each"),
    [
        ([8, 8], 16, 8),
        ([8, 8], 12, 6),
        ([8, 8, 8], 12, 6),
        ([8, 4, 4], 16, 4),
        ([0, 8], 8, 8),
        ([3, 3], 5, 1),
        ([2], 16, 1),
        ([], 4, 1),
    ],
)
def test_stages_on_ray_fit_its_nodes(devices, world_size, each):
    nodes = [{"CPU": 64.0, "GPU": float(count), "memory": 1e9} if count else {"CPU": 64.0} for count in devices]
    assert ranks_of_each(world_size, {"CPU": 2, "GPU": 1}, nodes) == each


def test_missing_ray_error_says_what_to_install(monkeypatch, path):
    monkeypatch.setitem(sys.modules, "ray", None)  # pretend that ray is not installed
    with pytest.raises(ParallelError, match=r"Ray is not installed: pip install '.\[ray\]'"):
        parallelize(path, 2, workers={"launcher": "ray", "device": "cpu"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray": {"address": "auto"}}, "launcher is 'auto'; pass launcher='ray', too"),
        ({"launcher": "ray", "ray": {"adress": "auto"}}, r"ray has no option 'adress' \(did you mean 'address'\?\)"),
        ({"launcher": "ray", "ray": {"cpus": 0}}, "cpus is 0; it takes a number, more than 0"),
        ({"launcher": "ray", "ray": {"cpus": "two"}}, "ray: cpus is 'two'"),
        (
            {"launcher": "ray", "device": "cuda", "device_ids": [0, 1]},
            r"device_ids \[0, 1\] name devices of this machine",
        ),
    ],
)
def test_unsupported_launcher_options_are_refused(options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ParallelError, match=message):
        start_group(2, **options)


def test_number_of_remote_devices_is_required(path):
    with pytest.raises(PlacementError, match="num_gpus is None, and the ranks are on other hosts; set num_gpus"):
        parallelize(path, workers={"launcher": "ray", "device": "cuda"})


def test_ray_server_passes_devices_and_stages_on(monkeypatch):
    received = {}
    monkeypatch.setattr(
        serving_run, "parallelize", lambda *arguments, **options: received.update(options, all=arguments)
    )
    monkeypatch.setattr(serving_run.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    serving_run.load(
        ServeOptions("model", num_gpus=8, replicas=2, device="cuda", launcher="ray", strategy="tensor+pipeline"),
        Kind(),
    )
    assert received["all"] == ("model", 8)
    assert {name: received["workers"][name] for name in ("device", "launcher", "replicas")} == {
        "device": "cuda",
        "launcher": "ray",
        "replicas": 1,  # each replica of Ray Serve holds the model
    }
    assert received["fit"].over([4, 4]).tensor == 4


def test_ray_server_without_ray_says_what_to_install(monkeypatch, path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "parallelformers_ng.serving.on_ray", raising=False)
    with pytest.raises(ParallelError, match=r"pip install '\.\[serve,ray\]'"):
        serve.serve(argparse.Namespace(config=None, command="serve", model=str(path), launcher="ray"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "slurm"}, "launcher is 'slurm'; set 'local' or 'ray'"),
        ({"ray_address": "auto"}, "ray_address is 'auto', which needs launcher 'ray'"),
        ({"autoscaling": ["max_replicas=2"]}, "which needs launcher 'ray'"),
    ],
)
def test_options_not_for_launchers_are_refused(options, message):
    with pytest.raises(ParallelError, match=message):
        ServeOptions("model", **options)
