"""Measures prefill and decode of random Llama models on CPU: parallelformers_ng and other libraries, in one run.

Each worker of parallelformers_ng has one thread.

    python -m benchmarks.decode [--sizes 135M 600M] [--peers one native deepspeed] [--tokens 64] [--rounds 5]

Each contestant has its own processes. In each round one contestant after another is measured, and all other contestants
wait. `native` is transformers' tensor parallelism (needs accelerate). `deepspeed` is DeepSpeed's AutoTP (needs ninja
and a C++ compiler). Each rank of `native` and `deepspeed` is pinned to a core. `one` is a single process with as many
threads as ranks. `tensor_parallel` needs an interpreter with old versions of packages: --tensor-parallel PYTHON. If
other processes of the machine use more than --disturbance of the cores in a round, the round is measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
             "num_attention_heads": 9, "num_key_value_heads": 3},
    "135M-even": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
                  "num_attention_heads": 12, "num_key_value_heads": 4},
    "600M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
SHORT, LONG = 8, 512  # tokens
LIMIT_SECONDS = 300
_TICKS = os.sysconf("SC_CLK_TCK")
_CONTESTANT = str(Path(__file__).with_name("contestant.py"))


class Contestant:
    """The processes of one contestant. All processes get the same tasks; only the answer of the first process counts.

    Args:
        kind: kind of contestant, see `contestant.py`.
        directory: the checkpoint.
        ranks: number of workers; for kind `one`, the number of threads.
        python: path of the interpreter.
        path: folder from which parallelformers_ng is imported; by default the present working tree.
    """

    def __init__(self, kind: str, directory: str, ranks: int, python: str = sys.executable, path: str = "") -> None:
        self.processes = []
        several = kind in ("native", "deepspeed", "reader")
        threads = ranks if kind == "one" else 1
        cores = sorted(os.sched_getaffinity(0))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(ranks if several else 1):
            # "ours" assigns the cores to its workers; the thread count of its first process has no effect.
            environment = os.environ | {
                "OMP_NUM_THREADS": str(threads),
                "RANKS": str(ranks),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": path or os.pathsep.join(sys.path),
            }
            process = subprocess.Popen(
                [python, _CONTESTANT, kind, directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment if python == sys.executable else environment | {"PYTHONPATH": ""},
                text=True,
            )
            if several and ranks <= len(cores):
                os.sched_setaffinity(process.pid, {cores[rank]})
            self.processes.append(process)

    def wait_until_ready(self) -> None:
        for process in self.processes:
            _answer(process)

    def run(self, task: str, **arguments: int | float) -> list[dict[str, Any]]:
        """Give a task to all processes, and return their answers."""
        for process in self.processes:
            print(json.dumps({"task": task, **arguments}), file=process.stdin, flush=True)
        return [_answer(process) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"contestant {process.args} ended with code {process.wait()}")
    return json.loads(line)


@contextlib.contextmanager
def watched(memory: dict[str, float]) -> Iterator[None]:
    """Add to `memory` the shares of the cores, 0 to 1, that other processes ("others") and the hypervisor ("stolen")
    used during the block."""
    before, mine, start = _busy_seconds(), _own_seconds(), time.monotonic()
    yield
    after, cores = _busy_seconds(), os.cpu_count() or 1
    capacity = (time.monotonic() - start) * cores
    memory["others"] = max(0.0, after[0] - before[0] - _own_seconds() + mine) / capacity
    memory["stolen"] = (after[1] - before[1]) / capacity


def _busy_seconds() -> tuple[float, float]:
    user, nice, system, _, _, irq, softirq, steal = (
        int(field) / _TICKS for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return user + nice + system + irq + softirq, steal


def _own_seconds() -> float:
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def checkpoint(size: str, directory: str) -> int:
    """Write a random model of the size's shape in fp32, with a fixed seed. Returns its bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=True, **SHAPES[size])
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return sum(parameter.nbytes for parameter in model.parameters())


def compete(
    contestants: dict[str, Contestant], reader: Contestant, task: str, options: Any, **arguments: int
) -> dict[str, Any]:
    """Measure one task in rounds. Returns each contestant's tokens per second, and the disturbance of each figure.

    Each figure comes with the bytes per second that all cores read at the same time: on a machine that others share,
    the memory bandwidth may double from one minute to the next.
    """
    rounds: dict[str, Any] = {name: [] for name in contestants}
    read: dict[str, list[float]] = {name: [] for name in contestants}
    disturbances: list[dict[str, float]] = []
    tokens: dict[str, Any] = {}
    for contestant in contestants.values():
        contestant.run(task, **arguments)
    end = time.monotonic() + options.limit
    while len(disturbances) < options.rounds and time.monotonic() < end:
        figures, memory, disturbance = {}, {}, {"others": 0.0, "stolen": 0.0}
        before = _read(reader)
        for name, contestant in contestants.items():
            peaks: dict[str, float] = {}
            with watched(peaks):
                answer = contestant.run(task, **arguments)[0]
            after = _read(reader)
            figures[name], memory[name], before = answer["tokens_per_second"], (before + after) / 2, after
            tokens[name] = answer.get("tokens")
            disturbance = {key: max(disturbance[key], peaks[key]) for key in disturbance}
        print(
            f"  {disturbance['others']:.0%} to others, {disturbance['stolen']:.0%} stolen:",
            figures,
            file=sys.stderr,
            flush=True,
        )
        if disturbance["others"] <= options.disturbance:
            disturbances.append(disturbance)
            for name, figure in figures.items():
                rounds[name].append(figure)
                read[name].append(memory[name])
    equal = [name for name, peaks in tokens.items() if peaks is not None and peaks == tokens.get("one")]
    return {
        "figures": rounds,
        "read_bytes_per_second": read,
        "disturbance": disturbances,
        "same_tokens_as_one": equal,
    }


def _read(reader: Contestant) -> float:
    answers = reader.run("bandwidth", nbytes=400 << 20, start=time.monotonic() + 0.2, seconds=0.5)
    return float(sum(answer["bytes_per_second"] for answer in answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sizes", nargs="+", choices=SHAPES, default=list(SHAPES), help="with 2 ranks: 135M has 9 heads, even has 12"
    )
    parser.add_argument("--peers", nargs="*", choices=["one", "native", "deepspeed"], default=["one", "native"])
    parser.add_argument("--tensor-parallel", metavar="PYTHON", help="path of an interpreter with tensor_parallel")
    parser.add_argument(
        "--also", metavar="PATH", action="append", default=[], help="folder of another version of parallelformers_ng"
    )
    parser.add_argument("--tasks", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"])
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded in each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--disturbance", type=float, default=0.04, help="share of the cores, 0 to 1")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for the rounds of one task")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    reader = Contestant("reader", "", options.ranks)
    reader.wait_until_ready()
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            weights = checkpoint(size, directory)
            contestants = {kind: Contestant(kind, directory, options.ranks) for kind in (*options.peers, "ours")}
            for path in options.also:
                contestants[f"ours at {path}"] = Contestant("ours", directory, options.ranks, path=path)
            if options.tensor_parallel:
                python = options.tensor_parallel
                contestants["tensor_parallel"] = Contestant("tensor_parallel", directory, options.ranks, python)
            for contestant in contestants.values():
                stack.callback(contestant.close)
            for name, contestant in list(contestants.items()):
                try:
                    contestant.wait_until_ready()
                    contestant.run("decode", prompt=SHORT, tokens=2)
                except RuntimeError as error:
                    print(f"{name} does not run: {error}", file=sys.stderr)
                    del contestants[name]
            for task in options.tasks:
                arguments = {"prompt": SHORT, "tokens": options.tokens} if task == "decode" else {"prompt": LONG}
                results = compete(contestants, reader, task, options, **arguments)
                _show(size, task, weights, results)
                measure.save(options.json, f"{task} {size}", results)
    reader.close()


def _show(size: str, task: str, weights: int, results: dict[str, Any]) -> None:
    figures, read = results["figures"], results["read_bytes_per_second"]
    every = [value for values in read.values() for value in values]
    if not all(figures.values()):
        print(f"{task}, {size}: no undisturbed round")
        return
    first = next(iter(figures))
    measure.report(f"{task}, {size} ({weights / 1e9:.2f} GB fp32)", "tokens/s", figures, first, higher_is_better=True)
    print(f"  read bandwidth {min(every) / 1e9:.1f} to {max(every) / 1e9:.1f} GB/s;", end=" ")
    print(f"same tokens as one process: {results['same_tokens_as_one']}")
    if task == "decode":
        for name, values in figures.items():
            shares = [value * weights / limit for value, limit in zip(values, read[name], strict=True)]
            print(f"  {name:<34} {statistics.median(shares):6.1%} of it (median), best {max(shares):.1%}")


if __name__ == "__main__":
    main()
