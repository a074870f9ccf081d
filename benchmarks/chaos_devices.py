"""Faults of devices, on pretended ones: `tests/pretend_cuda` says what those show, and what they cannot."""

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

PATIENCE_SECONDS = 60.0  # a request that takes longer counts as hung
_TOKENS = 6  # of which the last ones come from recorded steps


@dataclass
class Outcome:
    """The outcome of the faults.

    Attributes:
        kinds: how often each kind struck.
        untrue: faults that reached the caller with another cause, or another rank, in words.
        unrecovered: faults after which the next answer was wrong, or none, in words.
        hung: requests that took longer than anybody waits.
        needless: restarts that were not due.
        seconds: to the next answer, after each fault that is no cause for a restart.
        grown: bytes that a device had more after such a fault than before the first one.
        replays: replays of recorded steps.
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
    """Each kind in turn, on a random rank at a random step."""
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
    """Have `count` requests fail, each kind in turn, and ask again after each. Needs `believe`."""
    source, outcome, ids = random.Random(seed), Outcome(), token_ids()
    generation: dict[str, Any] = {"max_new_tokens": _TOKENS, "do_sample": False}
    want = gpt2().generate(ids, **generation)
    options = {"device": "cuda", "host_copy": True, "timeout": PATIENCE_SECONDS, "max_restarts": count + 1}
    with parallelize(gpt2(), 2, workers=options, decode="cuda_graphs") as model:
        taken = _taken(model, ids, **generation)
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
            if not isinstance(answer, torch.Tensor) or not torch.equal(answer, want):
                outcome.unrecovered.append(f"after {name} on rank {rank} at step {step}: {answer!r}")
            outcome.needless += deployment_of(model).incarnation > before + kind.restarts
            if not kind.restarts:
                outcome.seconds.append(seconds)
                outcome.grown.append(_taken(model, ids, **generation) - taken)
        outcome.replays = _group(model).call("graphs")[1]
    return outcome


def _group(model: Any) -> WorkerGroup:
    return deployment_of(model).replicas[0].group


def _taken(model: Any, ids: torch.Tensor, **options: Any) -> int:
    """Bytes on the device of rank 0 once what all calls of one kind need is there."""
    for _ in range(2):
        model.generate(ids, **options)
    return _group(model).call("reserved", collect=True)


def _error_of(model: Any, **options: Any) -> Exception | None:
    answer = _answer_of(model, **options)
    return answer if isinstance(answer, Exception) else None


def _answer_of(model: Any, **options: Any) -> torch.Tensor | Exception:
    try:
        return model.generate(**options)
    except Exception as error:  # whatever it is, it is compared with what is due
        return error
