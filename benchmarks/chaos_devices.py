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
from tests.pretend_cuda.caller import believe
from tests.pretend_cuda.faults import KINDS, LATE_SECONDS, Fault
from tests.zoo.case import VOCABULARY, token_ids
from tests.zoo.decoders import gpt2

PATIENCE_SECONDS = 60.0  # a request that takes longer counts as hung
_TOKENS = 4


@dataclass
class Outcome:
    """What came of the faults.

    Attributes:
        kinds: how often each kind struck.
        untrue: faults of which the caller got another cause, or another rank, in words.
        unrecovered: faults after which the next answer was wrong, or none, in words.
        hung: requests that took longer than anybody waits.
        needless: restarts that were not due.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    untrue: list[str] = field(default_factory=list)
    unrecovered: list[str] = field(default_factory=list)
    hung: int = 0
    needless: int = 0


def figures(count: int, seed: int) -> list[Figure]:
    """Each kind in turn, on a random rank at a random step."""
    with pytest.MonkeyPatch.context() as patch:
        believe(patch)
        found = faults(count, seed)
    print(f"  faults {dict(found.kinds)}", *found.untrue, *found.unrecovered, sep="\n  ", flush=True)
    return [
        Figure("another cause, or rank, than the fault's", "sum", 0, [len(found.untrue)]),
        Figure("wrong next answers", "sum", 0, [len(found.unrecovered)]),
        Figure("hung", "sum", 0, [found.hung]),
        Figure("restarts that were not due", "sum", 0, [found.needless]),
    ]


def faults(count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Outcome:
    """Have `count` requests fail, each kind in turn, and ask again after each. Needs `believe`."""
    source, found, ids = random.Random(seed), Outcome(), token_ids()
    how: dict[str, Any] = {"max_new_tokens": _TOKENS, "do_sample": False}
    want = gpt2().generate(ids, **how)
    options = {"device": "cuda", "host_copy": True, "timeout": PATIENCE_SECONDS, "max_restarts": count + 1}
    with parallelize(gpt2(), 2, workers=options) as model:
        for name in tqdm([kinds[number % len(kinds)] for number in range(count)], "faults", disable=None):
            deployment_of(model).replicas[0].ready(time.monotonic() + PATIENCE_SECONDS)
            kind, rank, before = KINDS[name], source.randrange(2), deployment_of(model).incarnation
            pid, step = deployment_of(model).pids[rank], source.randrange(_TOKENS)
            given = ids.clone()
            given[1, 3] = VOCABULARY + 5 if kind.strikes is None else given[1, 3]
            late = {"timeout": LATE_SECONDS} if name == "late rank" else {}
            error = _error_of(model, given, logits_processor=[Fault(name, pid, ids.shape[1] + step)], **how, **late)
            found.kinds[name] += 1
            found.hung += isinstance(error, RequestTimeoutError) and not late
            blamed = getattr(error, "rank", rank) if kind.strikes is not None else rank
            if not isinstance(error, kind.raises) or kind.says not in str(error) or blamed != rank:
                found.untrue.append(f"{name} on rank {rank} at step {step}: {error!r}")
            answer = _answer_of(model, ids, **how)
            if not isinstance(answer, torch.Tensor) or not torch.equal(answer, want):
                found.unrecovered.append(f"after {name} on rank {rank} at step {step}: {answer!r}")
            found.needless += deployment_of(model).incarnation > before + kind.restarts
    return found


def _error_of(model: Any, ids: torch.Tensor, **how: Any) -> Exception | None:
    answer = _answer_of(model, ids, **how)
    return answer if isinstance(answer, Exception) else None


def _answer_of(model: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor | Exception:
    try:
        return model.generate(ids, **how)
    except Exception as error:  # whatever it is, it is compared with what is due
        return error
