"""Loading a checkpoint: memory of all processes, and time to the first token, beside transformers' own ways.

    python benchmarks/loading.py [--ranks 2] [--repeats 3] [--layers 20] [--json FILE]

A checkpoint of random weights (a Llama shape, bfloat16, 2.1 GB with 20 layers) is made in a temporary directory and
removed afterwards. The ways are run in turn, each in processes of its own; the clock starts when the interpreters are
up and the libraries imported. "cold" drops the file from the page cache before the run; the disk may have a cache of
its own. Memory is taken in runs of its own, since sampling it costs time.

    ours         parallelize("directory")
    ours_cut     parallelize("directory") of what save_sharded wrote
    ours_given   parallelize(model) after from_pretrained: the model is handed over
    whole        from_pretrained in one process
    native       from_pretrained with DistributedConfig(tp_size=ranks) under torchrun
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WAYS = ("ours", "ours_cut", "whole", "native")
MEMORY_WAYS = ("ours", "ours_cut", "ours_given", "whole")
PROMPT = [[1, 17, 42, 99, 5, 23, 8, 64]]


def make_checkpoint(directory: Path, layers: int) -> int:
    """Write the checkpoint without ever holding it; returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from parallelformers_ng.checkpoint.writing import write_safetensors

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.save_pretrained(directory)
    state = model.state_dict()
    block = (torch.randn(32000 * 2048) * 0.02).to(torch.bfloat16)
    entries = {name: (tuple(tensor.shape), torch.bfloat16) for name, tensor in state.items()}
    file = write_safetensors(
        directory / "model.safetensors", entries, lambda name: block[: state[name].numel()].view(state[name].shape)
    )
    return file.size


class Memory:
    """Samples the memory of some processes: bytes of PSS summed over them, and each one's anonymous memory."""

    def __init__(self, pids: Iterable[int], interval: float = 0.05) -> None:
        self.pids = list(pids)
        self.before = self.now()
        self.peak = dict.fromkeys((*self.pids, "pss"), 0)
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def now(self) -> dict[Any, int]:
        taken: dict[Any, int] = {"pss": 0}
        for pid in self.pids:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            fields = {line.split()[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
            taken["pss"] += fields["Pss:"]
            taken[pid] = fields["Anonymous:"]
        return taken

    def stop(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join()
        grown = {pid: self.peak[pid] - self.before[pid] for pid in self.pids}
        return {
            "pss": self.peak["pss"] - self.before["pss"],
            "parent_anonymous": grown[self.pids[0]],
            "rank_anonymous": [grown[pid] for pid in self.pids[1:]],
        }

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            for key, value in self.now().items():
                self.peak[key] = max(self.peak[key], value)


def run_ours(directory: str, ranks: int, sampled: bool, given: bool = False) -> dict[str, Any]:
    import torch
    from transformers import LlamaForCausalLM

    from parallelformers_ng import parallelize, start_group

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    with start_group(ranks, device="cpu") as group:
        memory = Memory([os.getpid(), *group.pids]) if sampled else None
        start = time.perf_counter()
        source = LlamaForCausalLM.from_pretrained(directory) if given else directory
        model = parallelize(source, group=group)
        loaded = time.perf_counter()
        del source
        token = model.generate(torch.tensor(PROMPT), max_new_tokens=1, do_sample=False)[0, -1].item()
        end = time.perf_counter()
        result = {"load": loaded - start, "first_token": end - start, "token": token}
        if memory is not None:
            shards = model.shard_plan
            result |= memory.stop() | {"shard": shards.bytes_per_rank, "weights": shards.bytes_whole}
    return result


def run_whole(directory: str, sampled: bool, tp_size: int = 1) -> dict[str, Any]:
    import torch
    from transformers import LlamaForCausalLM

    options: dict[str, Any] = {}
    if tp_size > 1:
        from transformers.distributed import DistributedConfig

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // tp_size))
        torch.distributed.init_process_group("gloo")
        options = {"distributed_config": DistributedConfig(tp_size=tp_size)}
        torch.distributed.barrier()
    memory = Memory([os.getpid()]) if sampled else None
    start = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(directory, **options)
    loaded = time.perf_counter()
    token = model.generate(torch.tensor(PROMPT), max_new_tokens=1, do_sample=False)[0, -1].item()
    end = time.perf_counter()
    result = {"load": loaded - start, "first_token": end - start, "token": token}
    return result | (memory.stop() if memory is not None else {})


def drop_from_cache(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(way: str, directory: Path, ranks: int, sampled: bool) -> dict[str, Any]:
    """Run one way in new processes and read what it prints."""
    script = [__file__, "--way", way, "--directory", str(directory), "--ranks", str(ranks)]
    command = [sys.executable, *script, *(["--sampled"] if sampled else [])]
    if way == "native":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not results:
        return {"error": done.stderr[-1500:]}
    return max(results, key=lambda result: result["first_token"])


def measure(directory: Path, ranks: int, repeats: int) -> dict[str, Any]:
    report: dict[str, Any] = {"times": {}, "memory": {}}
    cut = directory / "cut"
    for temperature in ("warm", "cold"):
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way in WAYS:
                place = cut if way == "ours_cut" else directory
                if temperature == "cold":
                    drop_from_cache(place)
                else:
                    for file in place.glob("*.safetensors"):
                        with open(file, "rb") as opened:
                            while opened.read(1 << 24):
                                pass
                runs[way].append(child(way, place, ranks, sampled=False))
        report["times"][temperature] = {way: _summary(results) for way, results in runs.items()}
    for way in MEMORY_WAYS:
        report["memory"][way] = child(way, cut if way == "ours_cut" else directory, ranks, sampled=True)
    return report


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    good = [result for result in results if "error" not in result]
    if not good:
        return {"error": results[0]["error"]}
    summary: dict[str, Any] = {"token": good[0]["token"]}
    for name in ("load", "first_token"):
        values = [result[name] for result in good]
        summary[name] = {"min": min(values), "median": statistics.median(values)}
    return summary


def show(report: dict[str, Any]) -> None:
    """Print the report for people: seconds, and gigabytes above what the processes held before."""
    print(f"checkpoint {report['bytes'] / 1e9:.2f} GB, {report['hardware']}")
    for temperature, ways in report["times"].items():
        for way, result in ways.items():
            if "error" in result:
                print(f"{temperature:<5} {way:<11} failed: {result['error'].strip().splitlines()[-1]}")
                continue
            load, token = result["load"], result["first_token"]
            print(
                f"{temperature:<5} {way:<11} loaded {load['min']:6.2f} s (median {load['median']:6.2f})"
                f"   first token {token['min']:6.2f} s (median {token['median']:6.2f})"
            )
    for way, result in report["memory"].items():
        if "error" in result:
            print(f"{way:<11} failed: {result['error'].strip().splitlines()[-1]}")
            continue
        ranks = ", ".join(f"{size / 1e9:.3f}" for size in result["rank_anonymous"])
        print(
            f"{way:<11} peak PSS of all {result['pss'] / report['bytes']:.3f} × checkpoint, anonymous: parent"
            f" {result['parent_anonymous'] / 1e9:.3f} GB, ranks {ranks or '-'} GB"
        )


def main() -> None:
    """Make the checkpoint, run every way, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--sampled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        if options.way.startswith("ours"):
            given = options.way == "ours_given"
            result = run_ours(options.directory, options.ranks, options.sampled, given)
        else:
            tp_size = options.ranks if options.way == "native" else 1
            result = run_whole(options.directory, options.sampled, tp_size)
        print(json.dumps(result), flush=True)
        return

    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        directory = Path(folder)
        size = make_checkpoint(directory, options.layers)
        from parallelformers_ng.saving import shard

        shard(folder, directory / "cut", options.ranks)
        report = measure(directory, options.ranks, options.repeats)
    report |= {"bytes": size, "ranks": options.ranks}
    report["hardware"] = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
