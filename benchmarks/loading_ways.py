"""Loads a checkpoint in one way and generates the first token; `benchmarks.loading` starts this program.

python -m benchmarks.loading_ways WAY DIRECTORY --ranks N --spawned SECONDS [--sampled]
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import measure

PROMPT = [[1, 17, 42, 99, 5, 23, 8, 64]]


class Memory:
    """A thread that samples the memory of processes: the sum of their PSS, and the anonymous memory of each, in bytes.

    Args:
        pids: process ids; growth is measured from their memory at the start.
        interval: seconds between samples.
    """

    def __init__(self, pids: Iterable[int], interval: float = 0.05) -> None:
        self.pids = list(pids)
        self.before = self.now()
        self.peak = dict(self.before)
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def now(self) -> dict[Any, int]:
        taken: dict[Any, int] = {"pss": 0}
        for pid in self.pids:
            fields = measure.memory(pid)
            taken["pss"] += fields["Pss"]
            taken[pid] = fields["Anonymous"]
        return taken

    def stop(self) -> dict[str, Any]:
        """Stop sampling. Returns the peak growth in bytes: of all processes together, of the first process, and of each
        further process."""
        self._stop.set()
        self._thread.join()
        grown = {key: self.peak[key] - self.before[key] for key in self.peak}
        return {
            "pss": grown["pss"],
            "parent_anonymous": grown[self.pids[0]],
            "rank_anonymous": [grown[pid] for pid in self.pids[1:]],
        }

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            for key, value in self.now().items():
                self.peak[key] = max(self.peak[key], value)


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Load with `parallelize`, on running workers ("ours", "cut", "given") or on workers that the call starts
    ("ours_new")."""
    import torch
    from transformers import LlamaForCausalLM

    from parallelformers_ng import parallelize, start_group

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    if options.way == "ours_new":
        return timed(lambda: parallelize(options.directory, options.ranks, workers={"device": "cpu"}), options)[0]
    with start_group(options.ranks, device="cpu") as group:
        memory = Memory([os.getpid(), *group.pids]) if options.sampled else None
        load: Callable[[str], Any] = LlamaForCausalLM.from_pretrained if options.way == "given" else str
        result, model = timed(lambda: parallelize(load(options.directory), workers=group), options)
        if memory is not None:
            plan = model.shard_plan
            largest = max(tensor.bytes_whole for tensor in plan.stored())
            result |= memory.stop() | {"shards": plan.bytes_per_rank, "largest": largest}
    return result


def shard(options: argparse.Namespace) -> dict[str, Any]:
    """Run the command `shard`, which shards a checkpoint without holding the whole in memory. Measures only memory."""
    from parallelformers_ng.model.saving import shard as cut

    memory = Memory([os.getpid()])
    cut(options.directory, Path(options.directory) / "cut by command", options.ranks, progress=False)
    return memory.stop()


def theirs(options: argparse.Namespace) -> dict[str, Any]:
    """Load with `from_pretrained`, in one process ("whole") or, under torchrun, with transformers' tensor-parallel plan
    ("native")."""
    import torch
    from transformers import LlamaForCausalLM

    loading: dict[str, Any] = {}
    if options.way == "native":
        from transformers.distributed import DistributedConfig

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
        torch.distributed.init_process_group("gloo")
        loading = {"distributed_config": DistributedConfig(tp_size=options.ranks)}
        torch.distributed.barrier()
    memory = Memory([os.getpid()]) if options.sampled else None
    result, _ = timed(lambda: LlamaForCausalLM.from_pretrained(options.directory, **loading), options)
    return result | (memory.stop() if memory is not None else {})


def timed(load: Callable[[], Any], options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Load a model and time it, in seconds.

    Returns:
        The times in seconds, and the model. `load` and `first_token` count from the call, `since_start` counts from the
        start of the process to the first token. `again` is the time of the same token from the warm model.
    """
    import torch

    def generate() -> int:
        return model.generate(torch.tensor(PROMPT), max_new_tokens=1, do_sample=False)[0, -1].item()

    began = time.perf_counter()
    model = load()
    loaded = time.perf_counter()
    token = generate()
    first, since = time.perf_counter(), time.time() - options.spawned
    generate()
    again = time.perf_counter() - first
    times = {"load": loaded - began, "first_token": first - began, "since_start": since, "again": again}
    return {**times, "token": token}, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("way", choices=["ours", "ours_new", "cut", "given", "shard", "whole", "native"])
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--spawned", type=float, required=True, help="start of this process, by time.time()")
    parser.add_argument("--sampled", action="store_true", help="measure memory, too; this takes time")
    options = parser.parse_args()
    run = {"whole": theirs, "native": theirs, "shard": shard}.get(options.way, ours)
    print(json.dumps(run(options)), flush=True)


if __name__ == "__main__":
    main()
