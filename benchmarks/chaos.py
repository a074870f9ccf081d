"""What the library promises when things go wrong, put to the test at length.

    python -m benchmarks.chaos [storm parents inputs cycles frames] [--seed 0] [--count N] [--json FILE]

| experiment | what happens |
| --- | --- |
| storm | 1,000 requests of 8 threads while workers are killed 50 times: idle, in prefill, in decode, in the reply |
| parents | the process that parallelized is killed 100 times, at any moment from the start of its workers on |
| inputs | 1,000 invalid requests; the whole model in one process says what each should give |
| cycles | parallelize and deparallelize 100 times, with workers of their own each time |
| frames | 100,000 control frames with flipped, lost and added bytes |

Everything runs on two CPU ranks with a tiny random model. Each experiment prints its figures beside its bars, and the
program fails where one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from benchmarks.chaos_frames import mutated_frames
from benchmarks.chaos_inputs import invalid_inputs
from benchmarks.chaos_storm import storm
from parallelformers_ng import parallelize
from parallelformers_ng.errors import GroupError, ParallelError
from parallelformers_ng.model import deployment_of
from tests.zoo.case import token_ids
from tests.zoo.decoders import gpt2


@dataclass(frozen=True)
class Figure:
    """One measured value and what it must not exceed."""

    name: str
    value: float
    at_most: float

    @property
    def holds(self) -> bool:
        return self.value <= self.at_most


# -- storm ------------------------------------------------------------------------------------------------------------


def storm_figures(count: int, seed: int) -> list[Figure]:
    """50 kills per 1,000 requests."""
    found = storm(count, 8, max(4, count // 20), seed)
    print(f"outcomes {dict(found.outcomes)}, kills {dict(found.killed_in)}", file=sys.stderr)
    untyped = sum(number for name, number in found.outcomes.items() if name.startswith("untyped"))
    return [
        Figure("wrong answers", found.outcomes["wrong"], 0),
        Figure("errors without a type", untyped, 0),
        Figure("hung", found.hung, 0),
        Figure("kill to error, p99, s", _quantile(found.latencies, 0.99), 0.5),
        Figure("kill to error, max, s", max(found.latencies, default=0.0), 2.0),
        Figure("kill to ready again, p95, s", _quantile(found.restarts, 0.95), 15.0),
    ]


# -- parents ----------------------------------------------------------------------------------------------------------


def parent_figures(count: int, seed: int) -> list[Figure]:
    """Kill a forked child of this process, which parallelizes, at random moments."""
    source = random.Random(seed)
    folder = tempfile.mkdtemp()
    shared = set(os.listdir("/dev/shm"))
    slowest, left = 0.0, 0
    for _ in range(count):
        child = os.fork()
        if child == 0:
            tempfile.tempdir = folder
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            model = parallelize(gpt2(), 2, device="cpu", backend=source.choice(["auto", "gloo"]))
            while True:
                model.generate(token_ids(), max_new_tokens=8, do_sample=False)
        time.sleep(source.uniform(0.0, 10.0))
        os.kill(child, signal.SIGKILL)
        killed = time.monotonic()
        os.waitpid(child, 0)
        while (alive := workers_of(child)) and time.monotonic() < killed + 10:
            time.sleep(0.02)
        slowest = max(slowest, time.monotonic() - killed)
        left += len(alive) + len(os.listdir(folder)) + len(set(os.listdir("/dev/shm")) - shared)
    shutil.rmtree(folder)
    return [
        Figure("kill to last worker gone, max, s", slowest, 2.0),
        Figure("processes, names and files left", left, 0),
    ]


def workers_of(parent: int) -> list[int]:
    """Workers that process `parent` started, by its id on their command line; zombies have none."""
    ending = b"%d\0" % parent
    found = []
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:  # it ended meanwhile
            continue
        if b"parallelformers_ng.runtime.worker\0" in line and line.endswith(b"\0" + ending):
            found.append(pid)
    return found


# -- inputs -----------------------------------------------------------------------------------------------------------


def input_figures(count: int, seed: int) -> list[Figure]:
    """Every invalid request gives an error that says something, or what the whole model gives."""
    whole, model = gpt2(), parallelize(gpt2(), 2, device="cpu", timeout=60)
    pids = deployment_of(model).pids
    outcomes: Counter[str] = Counter()
    for method, args, kwargs in invalid_inputs(random.Random(seed), count):
        try:
            got = getattr(model, method)(*args, **kwargs)
        except (GroupError, ParallelError, ValueError, TypeError) as error:
            outcomes["error" if str(error) else "error without words"] += 1
            continue
        except Exception as error:  # clear enough where one process says the same
            same = _error_of(whole, method, args, kwargs) == (type(error), str(error))
            outcomes["error" if same else f"untyped {type(error).__name__}"] += 1
            continue
        with torch.no_grad():
            want = getattr(whole, method)(*args, **kwargs)
        got, want = (got, want) if method == "generate" else (got.logits, want.logits)
        outcomes["right" if torch.allclose(got, want, atol=1e-4, equal_nan=True) else "wrong"] += 1
    print(f"outcomes {dict(outcomes)}", file=sys.stderr)
    restarted = int(deployment_of(model).pids != pids)
    model.deparallelize()
    unclear = count - outcomes["error"] - outcomes["right"]
    return [Figure("unclear errors and wrong answers", unclear, 0), Figure("restarts", restarted, 0)]


def _error_of(model: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[type, str] | None:
    try:
        getattr(model, method)(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None


# -- cycles -----------------------------------------------------------------------------------------------------------


def cycle_figures(count: int, seed: int) -> list[Figure]:
    """What this process has more of than after the first cycle."""
    me, model = psutil.Process(), gpt2()
    ids = token_ids(seed=seed)
    states = []
    for _ in range(count + 2):
        parallelize(model, 2, device="cpu")
        model(ids)
        model.deparallelize()
        states.append((me.num_fds(), threading.active_count(), len(me.children()), me.memory_info().rss))
    more = [last - first for first, last in zip(states[1], states[-1], strict=True)]
    return [
        Figure("more descriptors", more[0], 0),
        Figure("more threads", more[1], 0),
        Figure("more processes", more[2], 0),
        Figure("more resident memory, MB", more[3] / 1e6, 5.0),
    ]


# -- frames -----------------------------------------------------------------------------------------------------------


def frame_figures(count: int, seed: int) -> list[Figure]:
    """Mutated frames give a ProtocolError, or a value; their code never runs."""
    outcomes, ran, descriptors = mutated_frames(random.Random(seed), count)
    print(f"outcomes {dict(outcomes)}", file=sys.stderr)
    crashes = sum(number for name, number in outcomes.items() if name.startswith("crash"))
    return [
        Figure("errors of another kind", crashes, 0),
        Figure("code run", ran, 0),
        Figure("descriptors left", descriptors, 0),
    ]


# -- all of it --------------------------------------------------------------------------------------------------------

EXPERIMENTS: dict[str, tuple[Callable[[int, int], list[Figure]], int]] = {
    # Parents come first: they are forked, which is for a process without threads.
    "parents": (parent_figures, 100),
    "storm": (storm_figures, 1000),
    "inputs": (input_figures, 1000),
    "cycles": (cycle_figures, 100),
    "frames": (frame_figures, 100_000),
}


def _quantile(values: list[float], share: float) -> float:
    if len(values) < 2:
        return max(values, default=0.0)
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def main() -> None:
    """Run the experiments named on the command line, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=", ".join(EXPERIMENTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="requests, kills, cycles or frames, instead of each one's own number")
    parser.add_argument("--json", help="write the figures to this file, too")
    options = parser.parse_args()
    unknown = set(options.experiments) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}")
    print(f"{'':<44}{'measured':>12}{'at most':>12}")
    results: dict[str, dict[str, float]] = {}
    missed = False
    for name, (measure, standard_count) in EXPERIMENTS.items():
        if options.experiments and name not in options.experiments:
            continue
        count = options.count or standard_count
        start = time.monotonic()
        figures = measure(count, options.seed)
        print(f"{name}: {count} in {time.monotonic() - start:.0f} s")
        for figure in figures:
            print(
                f"  {figure.name:<42}{figure.value:>12.3g}{figure.at_most:>12.3g}{'' if figure.holds else '  missed'}"
            )
        sys.stdout.flush()
        results[name] = {"count": count, **{figure.name: figure.value for figure in figures}}
        missed |= not all(figure.holds for figure in figures)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"seed": options.seed, "cpus": os.cpu_count(), "results": results}, file, indent=1)
    sys.exit(missed)


if __name__ == "__main__":
    main()
