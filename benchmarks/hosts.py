"""Measures groups over several hosts: the time of a sum, the start on a Ray cluster, replicas, and equality of answers.

    python -m benchmarks.hosts sums                     two hosts of two ranks over loopback, against a flat gloo ring
    python -m benchmarks.hosts start [--count 5]        a cluster of two Ray nodes with two ranks each
    python -m benchmarks.hosts replicas                 two replicas of a rank with one thread, against one
    python -m benchmarks.hosts equal --nodes 4 --each 4    forward, generate, batches, caches and saving on Ray nodes

`start`, `replicas` and `equal` need Ray. Each command prints its figure and its limit, and fails if the figure misses
the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks import serving
from benchmarks.measure import machine
from parallelformers_ng import parallelize, save_sharded
from parallelformers_ng.hosts.hosts import Hosts
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.ray_cluster import ray_cluster
from tests.helpers.saved_model import save_tiny_model
from tests.helpers.simulated_hosts import SimulatedHosts

SUM_BYTES, SUM_BAR = 64 << 10, 0.7
START_BAR = 10.0
REPLICAS_BAR = 1.6


class Sums:
    """Measures sums on a rank of the command `sums`."""

    def __init__(self, rank: int, world_size: int, device: torch.device, communicator: Any, emit: Any) -> None:
        self.rank, self.world_size, self.communicator = rank, world_size, communicator

    def connect(self, path: str) -> None:
        """Join torch's gloo group of all ranks over the loopback interface."""
        store = dist.FileStore(path, self.world_size)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        self.gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def measure(self, count: int) -> tuple[float, float]:
        """Return the seconds of a two-stage sum and of gloo's ring sum: medians of one round."""
        tensor = torch.zeros(SUM_BYTES // 4)
        return self._median(lambda: self.communicator.all_reduce(tensor), count), self._median(
            lambda: self.gloo.allreduce([tensor], dist.AllreduceOptions()).wait(), count
        )

    def _median(self, action: Any, count: int) -> float:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return statistics.median(times[count // 10 :])


def sums(options: argparse.Namespace) -> bool:
    """Compare the two-stage sum of 64 KB, over two hosts with two ranks each, with gloo's ring. Returns whether the
    ratio is within the limit."""
    apart = not options.shared
    with (
        tempfile.TemporaryDirectory() as folder,
        WorkerGroup(
            4, target="benchmarks.hosts:Sums", threads=1, hosts=lambda: Hosts(SimulatedHosts(2, 2, apart=apart))
        ) as group,
    ):
        group.call("connect", f"{folder}/store")
        runs = [group.call("measure", 200) for _ in range(options.count + 1)][1:]
    staged, ring = (statistics.median(times) * 1e6 for times in zip(*runs, strict=True))
    ratio = statistics.median(one / other for one, other in runs)
    print(f"two stages {staged:.0f} µs, gloo's ring {ring:.0f} µs: {ratio:.2f} of it; at most {SUM_BAR}")
    return ratio <= SUM_BAR


def start(options: argparse.Namespace) -> bool:
    """Measure the seconds of `parallelize` on a running Ray cluster. The caller has imported all packages; the first
    start includes imports on the hosts."""
    with tempfile.TemporaryDirectory() as folder, ray_cluster(nodes=2, cpus=2):
        path = save_tiny_model(Path(folder))
        times = []
        for _ in range(options.count):
            begun = time.perf_counter()
            with parallelize(path, 4, workers={"launcher": "ray", "device": "cpu"}, progress=False):
                times.append(time.perf_counter() - begun)
    print(
        f"start: {', '.join(f'{each:.1f}' for each in times)} s; at most {START_BAR:g} s, imports on the hosts among it"
    )
    return statistics.median(times) <= START_BAR


def replicas(options: argparse.Namespace) -> bool:
    """Measure how much faster two replicas serve 16 concurrent mixed requests than one replica. The model has the shape
    of SmolLM2-135M, so that ranks take most of a request's time."""
    from parallelformers_ng.serving.on_ray import deployed

    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder, ray_cluster(nodes=2, cpus=1):
        serving.save(folder, torch.float32)
        for count, times in seconds.items():
            served = ServeOptions(
                folder, 1, count, device="cpu", launcher="ray", port=8123, served_model_name="m", prefix_tokens=0
            )
            requests = serving.mixed("m")
            tokens = sum(each["max_tokens"] for each in requests)
            with deployed(served) as url, httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
                serving.tokens_per_second(client, requests)
                times += [tokens / serving.tokens_per_second(client, requests) for _ in range(options.count)]
            print(f"{count} replicas: {', '.join(f'{each:.2f}' for each in times)} s", flush=True)
    one, two = map(statistics.median, seconds.values())
    print(f"one replica {one:.1f} s, two {two:.1f} s: {one / two:.2f} times; at least {REPLICAS_BAR}")
    return one / two >= REPLICAS_BAR


def equal(options: argparse.Namespace) -> bool:
    """Compare the outputs of a model on Ray nodes with the outputs of the whole model."""
    ranks = options.nodes * options.each
    with tempfile.TemporaryDirectory() as folder, ray_cluster(nodes=options.nodes, cpus=options.each):
        path = save_tiny_model(Path(folder) / "model")
        whole = AutoModelForCausalLM.from_pretrained(path).eval()
        workers = {"launcher": "ray", "device": "cpu", "start_timeout": 600}
        with parallelize(path, ranks, workers=workers, progress=False) as model:
            checks = compare(model, whole, Path(folder))
    print(
        f"{ranks} ranks on {options.nodes} nodes:", ", ".join(f"{name} {verdict}" for name, verdict in checks.items())
    )
    return all(checks.values())


def compare(model: Any, whole: Any, folder: Path) -> dict[str, bool]:
    """Return, for each subject, whether the model on several hosts gives the same result as the whole model."""
    ids = torch.randint(1, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    checks: dict[str, bool] = {}
    checks["forward"] = torch.allclose(model(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
    for name, options in {"greedy": {}, "beams": {"num_beams": 3}, "sampled": {"do_sample": True}}.items():
        torch.manual_seed(3)
        tokens = model.generate(ids, max_new_tokens=8, pad_token_id=0, **options)
        torch.manual_seed(3)
        checks[name] = torch.equal(tokens, whole.generate(ids, max_new_tokens=8, pad_token_id=0, **options))
    prompts = [ids[:1, :length] for length in range(2, 8)]
    answers: dict[int, torch.Tensor] = {}

    def ask(number: int) -> None:
        answers[number] = model.generate(prompts[number], max_new_tokens=12)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    due = [whole.generate(prompt, max_new_tokens=12) for prompt in prompts]
    checks["batches"] = all(torch.equal(answers[number], each) for number, each in enumerate(due))
    cached = [each(ids, use_cache=True).past_key_values for each in (model, whole)]
    more = [each(ids[:, :1], past_key_values=cache).logits for each, cache in zip((model, whole), cached, strict=True)]
    checks["caches"] = torch.allclose(*more, rtol=1e-4, atol=1e-4)
    model.save_pretrained(folder / "whole")
    save_sharded(model, folder / "cut")
    saved = AutoModelForCausalLM.from_pretrained(folder / "whole").state_dict()
    checks["saving"] = all(torch.equal(tensor, saved[name]) for name, tensor in whole.state_dict().items())
    with parallelize(folder / "cut", 2, workers={"device": "cpu", "launcher": "local"}, progress=False) as again:
        checks["saved cut"] = torch.allclose(again(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sums", "start", "replicas", "equal"))
    parser.add_argument("--count", type=int, default=5, help="rounds")
    parser.add_argument(
        "--shared",
        action="store_true",
        help="for sums: all simulated hosts share all CPUs; by default each host has its own",
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--each", type=int, default=2, help="ranks of each node")
    options = parser.parse_args()
    print(machine(), flush=True)
    sys.exit(not {"sums": sums, "start": start, "replicas": replicas, "equal": equal}[options.what](options))


if __name__ == "__main__":
    main()
