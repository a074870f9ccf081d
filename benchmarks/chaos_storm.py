"""Runs requests of many threads, and kills workers at chosen phases of the requests."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.chaos_figures import Figure
from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.zoo.case import token_ids
from tests.zoo.decoders import gpt2

PATIENCE_SECONDS = 120.0  # a longer request counts as hung
PHASES = ("idle", "prefill", "decode", "reply")


@dataclass
class Phase:
    """Phase of a thread's running request. As a streamer, the object gets the tokens, and so observes the phase."""

    name: str = "idle"

    def put(self, value: torch.Tensor) -> None:
        self.name = "prefill" if self.name == "idle" else "decode"

    def end(self) -> None:
        self.name = "reply"


Job = Callable[[Any, Phase], torch.Tensor]  # runs a call of the given model


@dataclass
class Storm:
    """The outcome of requests from many threads during kills of workers.

    Attributes:
        outcomes: number of requests for each outcome: "right", "wrong", "untyped …", or the name of a typed error.
        latencies: seconds from a kill to the error of a running request.
        restarts: seconds from each kill until the group was ready again.
        killed_in: number of kills in each phase.
        hung: number of threads whose request never ended.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    killed_in: Counter[str] = field(default_factory=Counter)
    hung: int = 0


def figures(count: int, seed: int) -> list[Figure]:
    """Run a storm of 8 threads with 50 kills per 1,000 requests, and return the figures."""
    result = storm(count, 8, max(4, count // 20), seed)
    print(f"  outcomes {dict(result.outcomes)}, kills {dict(result.killed_in)}", flush=True)
    untyped = sum(number for name, number in result.outcomes.items() if name.startswith("untyped"))
    return [
        Figure("wrong answers", "sum", 0, [result.outcomes["wrong"]]),
        Figure("errors without a type", "sum", 0, [untyped]),
        Figure("hung", "sum", 0, [result.hung]),
        Figure("kill to error, p99, s", "p99", 0.5, result.latencies),
        Figure("kill to error, max, s", "max", 2.0, result.latencies),
        Figure("kill to ready again, p95, s", "p95", 1.5, result.restarts),
    ]


def storm(requests: int, threads: int, kills: int, seed: int, calm: WorkerGroup | None = None) -> Storm:
    """Run requests from several threads, and kill workers meanwhile.

    Args:
        requests: minimum number of requests; requests continue until the last kill.
        threads: number of threads with requests.
        kills: number of kills, in each of `PHASES` in turn.
        seed: seed of the requests and of the kills.
        calm: group of two ranks that computes the right answers without kills; None to start a new group.
    """
    source, result, lock = random.Random(seed), Storm(), threading.Lock()
    jobs, wanted = _jobs(source, calm)
    model = parallelize(gpt2(), 2, workers={"device": "cpu", "timeout": PATIENCE_SECONDS, "max_restarts": 10 * kills})
    phases = [Phase() for _ in range(threads)]
    killed: list[float] = []
    left = iter(range(requests))
    pause = threading.Event()

    def work(phase: Phase) -> None:
        while True:
            with lock:
                if next(left, None) is None and len(killed) >= kills:
                    return
                number = source.randrange(len(jobs))
            pause.wait()
            phase.name = "idle"
            try:
                outcome = "right" if torch.equal(jobs[number](model, phase), wanted[number]) else "wrong"
            except ParallelError as error:
                outcome = type(error).__name__
            except Exception as error:  # an error without a public type
                outcome = f"untyped {type(error).__name__}"
            end, phase.name = time.monotonic(), "idle"
            with lock:
                result.outcomes[outcome] += 1
                if outcome not in ("right", "wrong"):
                    result.latencies += [end - max(when for when in killed if when <= end)]
            time.sleep(0.001)

    def kill() -> None:
        for number in tqdm(range(kills), "kills", disable=None):
            target = PHASES[number % len(PHASES)]
            _await_group(model)
            time.sleep(source.uniform(0.02, 0.2))
            if target == "idle":
                pause.clear()
                _wait_for(lambda: all(phase.name == "idle" for phase in phases), 0.2)
                time.sleep(0.1)
            else:
                _wait_for(lambda: any(phase.name == target for phase in phases), 2.0)  # noqa: B023 (called at once)
            pid = source.choice(deployment_of(model).pids)
            with lock:
                killed.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
            result.killed_in[target] += 1
            before = deployment_of(model).incarnation
            _wait_for(lambda: deployment_of(model).incarnation > before, PATIENCE_SECONDS)  # noqa: B023
            result.restarts.append(time.monotonic() - killed[-1])
            pause.set()

    pause.set()
    team = [threading.Thread(target=work, args=(phase,), daemon=True) for phase in phases]
    team.append(threading.Thread(target=kill, daemon=True))
    for thread in team:
        thread.start()
    for thread in team:
        thread.join(PATIENCE_SECONDS * (kills + 1))
    result.hung = sum(thread.is_alive() for thread in team)
    if not result.hung:
        model.deparallelize()
    return result


def _jobs(source: random.Random, group: WorkerGroup | None) -> tuple[list[Job], list[torch.Tensor]]:
    """Return jobs of greedy generation, seeded generation and plain forwards, and the right answer to each job."""
    jobs: list[Job] = []
    for number in range(12):
        ids = token_ids(rows=1 + number % 3, length=source.randrange(3, 12), seed=source.randrange(1 << 30))
        if number % 3 == 2:
            jobs.append(lambda model, phase, ids=ids: model(ids).logits.argmax(-1))
            continue
        # transformers accepts a streamer only for a single row.
        ids, options = ids[:1], {"max_new_tokens": source.randrange(4, 16), "do_sample": number % 3 == 1}
        jobs.append(
            lambda model, phase, ids=ids, options=options, seed=number: model.generate(
                ids, streamer=phase, **options, **({"seed": seed} if options["do_sample"] else {})
            )
        )
    # Seeded answers come from a calm group, because a single process draws from another random stream.
    calm = (
        parallelize(gpt2(), workers=group) if group is not None else parallelize(gpt2(), 2, workers={"device": "cpu"})
    )
    wanted = [job(calm, Phase()) for job in jobs]
    whole = calm.deparallelize()
    for number in (0, 2, 3, 5):
        with torch.no_grad():
            assert torch.equal(jobs[number](whole, Phase()), wanted[number]), "the calm group is wrong"
    return jobs, wanted


def _await_group(model: PreTrainedModel) -> None:
    deployment_of(model).replicas[0].ready(time.monotonic() + PATIENCE_SECONDS)


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.0005)
