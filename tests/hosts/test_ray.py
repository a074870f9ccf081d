"""Tests ranks on the nodes of a Ray cluster; all nodes are on this machine."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.hosts import compare
from parallelformers_ng import parallelize, start_group
from parallelformers_ng.collectives.spanning import interface_of
from parallelformers_ng.errors import ParallelError, StartupError, WorkerDiedError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.patience import await_end, await_incarnation
from tests.helpers.ray_cluster import add_node, ray_cluster
from tests.helpers.saved_model import save_tiny_model
from tests.helpers.server import save_served_model
from tests.pretend_cuda.caller import believe
from tests.pretend_cuda.ray_agent import PretendedAgent

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKERS = {"launcher": "ray", "device": "cpu", "start_timeout": 600}


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(nodes=2, cpus=2, gpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_two_nodes_equal_one_process(cluster, path, tmp_path):
    whole = AutoModelForCausalLM.from_pretrained(path).eval()
    with parallelize(path, 4, workers=WORKERS, progress=False) as model:
        group = deployment_of(model).replicas[0].group
        assert len(group.hosts.names) == 2
        assert ray.available_resources().get("CPU", 0) == 0
        assert all(compare(model, whole, tmp_path).values())
        pids = group.pids
    await_end(*pids)
    assert not [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]


def test_ranks_use_few_nodes_and_the_environment(cluster):
    options = {"runtime_env": {"env_vars": {"TEST_WORD": "said"}}}
    with start_group(2, **WORKERS, ray=options) as group:
        assert len(group.hosts.names) == 1
        words = [psutil.Process(pid).environ().get("TEST_WORD") for pid in group.pids]
    assert words == ["said", "said"]


@pytest.fixture
def devices(cluster, monkeypatch):
    """Make Ray report two devices per node, and make torch pretend these devices."""
    believe(monkeypatch)
    monkeypatch.setattr("parallelformers_ng.hosts.ray.Agent", PretendedAgent)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # the caller's machine has none


def test_ranks_take_devices_of_their_bundles(cluster, devices, path):
    ids = torch.arange(1, 8)[None]
    whole = AutoModelForCausalLM.from_pretrained(path).eval()
    workers = {**WORKERS, "device": "auto"}
    with parallelize(path, 4, workers=workers, fit={"strategy": "tensor+pipeline"}, progress=False) as model:
        group = deployment_of(model).replicas[0].group
        assert ray.available_resources().get("GPU", 0) == 0
        assert [
            each["bundles"] for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"
        ] == [{0: {"CPU": 2.0, "GPU": 2.0}, 1: {"CPU": 2.0, "GPU": 2.0}}]
        assert model.shard_plan.stages == 2
        assert torch.allclose(model(ids).logits, whole(ids).logits, atol=1e-4)
        names = ["CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"]
        interface = f"={interface_of(ray.util.get_node_ip_address())}"
        assert group.call_each("environment", [(names,)]) == [["0,1", interface]] * 4
        assert group.call_each("devices", [()]) == [{"cuda:0"}, {"cuda:1"}] * 2
        assert set(model.memory_allocated()) == {
            f"cuda:{each} on {host}" for host in group.hosts.names for each in (0, 1)
        }


def test_a_device_that_another_has_is_left_alone(cluster, devices):
    @ray.remote(num_cpus=0, num_gpus=1)
    class Other:
        def device(self):
            return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()[0]

    other = Other.remote()
    node, taken = ray.get(other.device.remote())
    with start_group(3, **{**WORKERS, "device": "cuda"}) as group:
        hosts = [name for name, count in zip(group.hosts.names, group.hosts.counts, strict=True) for _ in range(count)]
        (seen_by,) = zip(*group.call_each("environment", [(["CUDA_VISIBLE_DEVICES"],)]), strict=True)
        rest = str(1 - int(taken))
        assert sorted(seen_by) == sorted(["0,1", "0,1", rest])
        assert node[:8] in hosts[seen_by.index(rest)]
    ray.kill(other)


def test_too_many_devices_are_refused_with_count(cluster, devices):
    due = r"8 times \{'CPU': 1, 'GPU': 1\}, which 8 ranks on cuda need: of .*'GPU': 4"
    with pytest.raises(StartupError, match=due):
        start_group(8, launcher="ray", device="cuda", start_timeout=3)


def test_killed_node_is_named_and_group_recovers(cluster, path):
    ids = torch.arange(1, 8)[None]
    whole = AutoModelForCausalLM.from_pretrained(path).eval()
    spare = add_node(cluster, 2)
    with parallelize(path, 4, workers=WORKERS, progress=False) as model:
        group = deployment_of(model).replicas[0].group
        old = group.pids
        name = group.hosts.names[1]
        node = next(each for each in cluster.list_all_nodes() if each.node_id[:8] in name)

        class Streamer:
            def __init__(self) -> None:
                self.tokens = 0

            def put(self, _: torch.Tensor) -> None:
                self.tokens += 1
                if self.tokens == 3:
                    threading.Thread(target=cluster.remove_node, args=(node, False)).start()

            def end(self) -> None:
                pass

        with pytest.raises(WorkerDiedError) as raised:
            model.generate(ids, max_new_tokens=1900, streamer=Streamer())
        assert raised.value.rank in (2, 3)
        assert raised.value.host == name
        await_end(*old)
        await_incarnation(model, 1)
        assert torch.allclose(model(ids).logits, whole(ids).logits, atol=1e-4)
        assert not set(old) & set(deployment_of(model).pids)
    cluster.remove_node(spare)
    add_node(cluster, 2)


def test_too_many_ranks_are_refused_with_count(cluster):
    with pytest.raises(StartupError, match=r"no room in time for 64 times \{'CPU': 1\}, which 64 ranks on cpu"):
        start_group(64, launcher="ray", device="cpu", start_timeout=3)


def test_cluster_without_connection_is_refused(cluster):
    with pytest.raises(ParallelError, match=r"address is '10\.1\.1\.1:6379', but this process is connected to"):
        start_group(2, launcher="ray", device="cpu", ray={"address": "10.1.1.1:6379"})


def test_the_server_on_ray_serve(cluster, tmp_path):
    """One route serves two replicas of one rank each. `/ready` reports healthy replicas, and the replicas end
    afterwards."""
    from parallelformers_ng.serving.on_ray import deployed

    folder = save_served_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ServeOptions(str(folder), num_gpus=1, replicas=2, device="cpu", launcher="ray", port=port, api_key="k")
    body = {"prompt": "And", "max_tokens": 8, "temperature": 0}
    headers = {"Authorization": "Bearer k"}
    with deployed(options) as url, httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
        (application,) = serve.status().applications.values()
        (deployment,) = application.deployments.values()
        assert deployment.replica_states == {"RUNNING": 2}
        assert client.get("/ready").status_code == 200
        assert client.get("/ready", headers={"Authorization": "Bearer other"}).status_code == 401
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(16)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")
    assert ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_timeout": 3.0}, "client_timeout has no effect"),
        ({"port": 0}, "port is 0"),
        (
            {"replicas": 2, "autoscaling": ["max_replicas=2"]},
            "replicas is 2, but autoscaling sets the number of replicas",
        ),
        ({"autoscaling": ["max_replicas=two"]}, "autoscaling has 'max_replicas=two'; write NAME=NUMBER"),
        (
            {"autoscaling": ["max_replica=2"]},
            r"'max_replica', which is not a setting of Ray Serve \(did you mean 'max_replicas'",
        ),
        ({"autoscaling": ["min_replicas=3", "max_replicas=2"]}, "which Ray Serve refuses: .*max_replicas"),
    ],
)
def test_options_without_effect_on_serve_are_refused(options, message):
    from parallelformers_ng.serving.on_ray import deployed

    with (
        pytest.raises(ParallelError, match=f"(?s){message}"),
        deployed(ServeOptions("model", launcher="ray", **options)),
    ):
        pass
