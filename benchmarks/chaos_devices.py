"""Tests faults of CUDA devices on pretended devices; `tests/pretend_cuda` describes their limits."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tqdm import tqdm

from benchmarks.chaos_figures import Figure
from parallelformers_ng import parallelize
from parallelformers_ng.errors import RequestTimeoutError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.caller import believe
from tests.pretend_cuda.faults import KINDS, Fault, spoil
from tests.zoo.case import token_ids
from tests.zoo.decoders import gpt2

PATIENCE_SECONDS = 60.0  # a longer request counts as hung
_TOKENS = 6  # recorded steps produce the last tokens


@dataclass
class Outcome:
    """The outcome of all faults.

    Attributes:
        kinds: number of faults of each kind.
        untrue: descriptions of faults whose error in the caller has a wrong cause or a wrong rank.
        unrecovered: descriptions of faults whose next request gave a wrong answer or no answer.
        hung: number of requests that took longer than `PATIENCE_SECONDS`.
        needless: number of restarts after faults that need no restart.
        seconds: seconds of the next request, for each fault that needs no restart.
        grown: growth of a device's memory since before the first fault, in bytes, for each fault that needs no restart.
        replays: number of replays of recorded steps.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    untrue: list[str] = field(default_factory=list)
    unrecovered: list[str] = field(default_factory=list)
    hung: int = 0
    needless: int = 0
    seconds: list[float] = field(default_factory=list)
    grown: list[float] = field(default_factory=list)
    replays: int = 0


def figures(count: int, seed: int) -> list[Figure]:
    """Cause faults of each kind in turn, on a random rank at a random step, and return the figures."""
    with pytest.MonkeyPatch.context() as patch:
        believe(patch)
        outcome = faults(count, seed)
    print(f"  faults {dict(outcome.kinds)}", *outcome.untrue, *outcome.unrecovered, sep="\n  ", flush=True)
    return [
        Figure("another cause, or rank, than the fault's", "sum", 0, [len(outcome.untrue)]),
        Figure("wrong next answers", "sum", 0, [len(outcome.unrecovered)]),
        Figure("hung", "sum", 0, [outcome.hung]),
        Figure("restarts that were not due", "sum", 0, [outcome.needless]),
        Figure("s to the next answer, where no restart is due", "max", 1.0, outcome.seconds),
        Figure("bytes more on a device, where no restart is due", "max", 0, outcome.grown),
    ]


def faults(count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Outcome:
    """Cause a fault in each of `count` requests, and run a correct request after each fault.

    Args:
        count: number of faults.
        seed: seed of the ranks and the steps.
        kinds: kinds of faults, in turn.

    Requires pretended CUDA devices (`tests.pretend_cuda.caller.believe`).
    """
    source, outcome, ids = random.Random(seed), Outcome(), token_ids()
    generation: dict[str, Any] = {"max_new_tokens": _TOKENS, "do_sample": False}
    expected = gpt2().generate(ids, **generation)
    options = {"device": "cuda", "host_copy": True, "timeout": PATIENCE_SECONDS, "max_restarts": count + 1}
    with parallelize(gpt2(), 2, workers=options, decode="cuda_graphs") as model:
        reserved_bytes = _reserved_bytes(model, ids, **generation)
        for name in tqdm([kinds[number % len(kinds)] for number in range(count)], "faults", disable=None):
            deployment_of(model).replicas[0].ready(time.monotonic() + PATIENCE_SECONDS)
            kind, rank, before = KINDS[name], source.randrange(2), deployment_of(model).incarnation
            pid, step = deployment_of(model).pids[rank], source.randrange(_TOKENS)
            arguments = {
                "input_ids": ids.clone(),
                **generation,
                "logits_processor": [Fault(name, pid, ids.shape[1] + step)],
            }
            spoil(name, arguments, step)
            error = _error_of(model, **arguments)
            outcome.kinds[name] += 1
            outcome.hung += isinstance(error, RequestTimeoutError) and name != "late rank"
            blamed = getattr(error, "rank", rank) if kind.strikes is not None else rank
            if not isinstance(error, kind.raises) or kind.says not in str(error) or blamed != rank:
                outcome.untrue.append(f"{name} on rank {rank} at step {step}: {error!r}")
            begun = time.monotonic()
            answer = _answer_of(model, input_ids=ids, **generation)
            seconds = time.monotonic() - begun
            if not isinstance(answer, torch.Tensor) or not torch.equal(answer, expected):
                outcome.unrecovered.append(f"after {name} on rank {rank} at step {step}: {answer!r}")
            outcome.needless += deployment_of(model).incarnation > before + kind.restarts
            if not kind.restarts:
                outcome.seconds.append(seconds)
                outcome.grown.append(_reserved_bytes(model, ids, **generation) - reserved_bytes)
        outcome.replays = _group(model).call("graphs")[1]
    return outcome


def _group(model: Any) -> WorkerGroup:
    return deployment_of(model).replicas[0].group


def _reserved_bytes(model: Any, ids: torch.Tensor, **options: Any) -> int:
    """Return the bytes on the device of rank 0 after two equal calls, so that caches of the allocator are filled."""
    for _ in range(2):
        model.generate(ids, **options)
    return _group(model).call("reserved", collect=True)


def _error_of(model: Any, **options: Any) -> Exception | None:
    answer = _answer_of(model, **options)
    return answer if isinstance(answer, Exception) else None


def _answer_of(model: Any, **options: Any) -> torch.Tensor | Exception:
    try:
        return model.generate(**options)
    except Exception as error:  # the caller compares the error with the expected error
        return error
