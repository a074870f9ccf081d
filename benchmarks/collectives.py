"""Measures the latency of an all-reduce between CPU ranks: the C kernel and gloo, interleaved in one run.

    python -m benchmarks.collectives [--ranks 2 4] [--json OUT]

Each round measures every backend in turn, so that a disturbance of the machine affects all backends. A figure is the
time of one call on rank 0, in microseconds. "gloo" is the library's slowest backend: it gathers all tensors and sums
them in rank order. "gloo ring" is gloo's native all-reduce, the peer to beat.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.connect import connect
from parallelformers_ng.collectives.process_group import create_rendezvous, rendezvous_path
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator

SIZES = {8 * 1024: 400, 64 * 1024: 300, 256 * 1024: 100, 4 * 1024 * 1024: 10}
"""Message size in bytes → number of repetitions in a round, with the fastest backend."""


def measure(rank: int, world_size: int, fds: list[DupFd], rendezvous: str, rounds: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    gloo: Any = connect(
        "gloo",
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
        arena_fd=fds[-1].detach(),
        rendezvous=rendezvous,
        timeout=60.0,
    )
    backends: dict[str, tuple[int, Callable[[torch.Tensor], Any]]] = {}
    communicator = SharedMemoryCommunicator(Arena(fds[0].detach(), world_size), rank, 60.0)
    backends["shared memory"] = (1, communicator.all_reduce)
    backends["gloo"] = (8, gloo.all_reduce)
    backends["gloo ring"] = (8, lambda tensor: gloo._group.allreduce([tensor], dist.AllreduceOptions()).wait())

    times: dict[tuple[str, int], list[float]] = {(name, size): [] for name in backends for size in SIZES}
    for round_ in range(rounds + 1):  # the first one warms up
        for size, repeats in SIZES.items():
            tensor = torch.zeros(size // 4)
            for name, (divisor, all_reduce) in backends.items():
                gloo.all_reduce(torch.zeros(1))
                for _ in range(max(repeats // divisor, 5)):
                    start = time.perf_counter_ns()
                    all_reduce(tensor)
                    if round_:
                        times[name, size].append((time.perf_counter_ns() - start) / 1e3)
    if rank == 0:
        pipe.send(times)
    gloo.close()


def run(world_size: int, rounds: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    arenas = [Arena.create(world_size) for _ in ("shared memory", "gloo")]
    rendezvous = create_rendezvous()
    receiver, sender = context.Pipe(duplex=False)
    ranks = []
    for rank in range(world_size):
        arguments = (
            rank,
            world_size,
            [DupFd(arena.fd) for arena in arenas],
            rendezvous_path(rendezvous),
            rounds,
            sender,
        )
        ranks.append(context.Process(target=measure, args=arguments))
        ranks[-1].start()
    times = receiver.recv()
    for process in ranks:
        process.join()
    for arena in arenas:
        arena.close()
    os.close(rendezvous)
    rows = []
    for (name, size), values in times.items():
        values.sort()
        at = {"min": 0, "median": len(values) // 2, "p99": int(len(values) * 0.99)}
        figures = {key: round(values[index], 1) for key, index in at.items()}
        rows.append({"ranks": world_size, "backend": name, "bytes": size, "calls": len(values), **figures})
    return rows


def hardware() -> dict[str, Any]:
    with open("/proc/cpuinfo") as lines:
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    report: dict[str, Any] = {"hardware": hardware(), "rows": []}
    print(report["hardware"])
    print(f"{'ranks':>5} {'KiB':>6} {'backend':>10} {'calls':>6} {'min µs':>10} {'median µs':>10} {'p99 µs':>10}")
    for world_size in options.ranks:
        rows = run(world_size, options.rounds)
        for row in sorted(rows, key=lambda row: row["bytes"]):
            left = f"{row['ranks']:>5} {row['bytes'] // 1024:>6} {row['backend']:>10} {row['calls']:>6}"
            print(f"{left} {row['min']:>10} {row['median']:>10} {row['p99']:>10}", flush=True)
        report["rows"] += rows
    report["hardware"]["load after"] = os.getloadavg()
    print(f"load after: {report['hardware']['load after']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
