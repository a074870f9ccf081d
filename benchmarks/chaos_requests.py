"""Tests requests: a rank that raises, stops or has no free memory, too many restarts, and many threads at once."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import nn
from tqdm import tqdm

from benchmarks import soak
from benchmarks.chaos_figures import Figure
from parallelformers_ng import parallelize
from parallelformers_ng.errors import RequestTimeoutError, RestartLimitError, WorkerError
from parallelformers_ng.model.parallelized import deployment_of
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2

_RESTART_SECONDS = 120.0


def _is_right(model: Any, expected: torch.Tensor) -> bool:
    return torch.equal(model(**text_inputs()).logits.argmax(-1), expected)


def _wanted() -> torch.Tensor:
    with torch.no_grad():
        return gpt2()(**text_inputs()).logits.argmax(-1)


def _seconds_to(kind: type[Exception], action: Callable[[], Any]) -> tuple[float, Exception | None]:
    """Run an action; return its seconds and its exception. The exception is None if the action did not raise `kind`."""
    begin = time.monotonic()
    try:
        action()
    except kind as error:
        return time.monotonic() - begin, error
    except Exception:  # counted as a wrong error
        return time.monotonic() - begin, None
    return time.monotonic() - begin, None


def raise_at_two_tokens(module: nn.Module, args: Any) -> None:
    """Raise on rank 1 if the prompt has two tokens; a forward hook.

    The prompt is the signal because a hook cannot count calls: only the copy on rank 0 keeps its state between calls.
    """
    rank = next(layer.communicator.rank for layer in module.modules() if hasattr(layer, "communicator"))
    if rank == 1 and args[0].shape[1] == 2:
        raise ZeroDivisionError("a layer failed")


def raises(count: int, seed: int) -> list[Figure]:
    """Raise an exception in a block of rank 1 between normal calls, and return the figures."""
    source, model, expected = random.Random(seed), gpt2(), _wanted()
    pauses, two_tokens = [source.randrange(1, 4) for _ in range(count)], text_inputs()["input_ids"][:, :2]
    model.transformer.h[1].register_forward_pre_hook(raise_at_two_tokens)
    parallelize(model, 2, workers={"device": "cpu"})
    pids, seconds, wrong, unnamed = deployment_of(model).pids, [], 0, 0
    for pause in tqdm(pauses, "raises", disable=None):
        wrong += sum(not _is_right(model, expected) for _ in range(pause))
        taken, error = _seconds_to(ZeroDivisionError, lambda: model(two_tokens))
        seconds.append(taken)
        named = (
            isinstance(error, WorkerError) and error.rank == 1 and "raise ZeroDivisionError" in error.remote_traceback
        )
        unnamed += not named
    wrong += not _is_right(model, expected)
    restarts = deployment_of(model).pids != pids
    model.deparallelize()
    return [
        Figure("call to the original exception, max, s", "max", 1.0, seconds),
        Figure("of another type or without the remote traceback", "sum", 0, [unnamed]),
        Figure("wrong answers in between", "sum", 0, [wrong]),
        Figure("restarts", "sum", 0, [int(restarts)]),
    ]


def stops(count: int, seed: int) -> list[Figure]:
    """Stop a rank, run a request until its deadline, and check the next answer."""
    source, expected = random.Random(seed), _wanted()
    model = parallelize(gpt2(), 2, workers={"device": "cpu", "max_restarts": count + 1})
    late, untyped, lost = [], 0, 0
    for _ in tqdm(range(count), "stops", disable=None):
        deployment_of(model).replicas[0].ready(time.monotonic() + _RESTART_SECONDS)
        os.kill(source.choice(deployment_of(model).pids), signal.SIGSTOP)
        limit = source.uniform(0.1, 0.5)
        taken, error = _seconds_to(
            RequestTimeoutError, lambda limit=limit: model.generate(**text_inputs(), max_new_tokens=8, timeout=limit)
        )
        late.append(taken - limit)
        untyped += error is None
        lost += not _is_right(model, expected)
    model.deparallelize()
    return [
        Figure("error after the deadline, max, s", "max", 1.0, late),
        Figure("errors of another type", "sum", 0, [untyped]),
        Figure("groups that did not recover", "sum", 0, [lost]),
    ]


def memory(count: int, seed: int) -> list[Figure]:
    """Limit the memory of one worker or both workers, run a request over the limit, and remove the limit."""
    source, expected = random.Random(seed), _wanted()
    model = parallelize(gpt2(), 2, workers={"device": "cpu"})
    pids, untyped, wrong, seconds = deployment_of(model).pids, 0, 0, []
    many = torch.ones(1024, 60, dtype=torch.long)  # activations of some hundred megabytes
    for _ in tqdm(range(count), "memory", disable=None):
        short = pids if source.random() < 0.5 else [source.choice(pids)]
        for pid in short:
            size = psutil.Process(pid).memory_info().vms + (source.randrange(1, 8) << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        taken, error = _seconds_to(WorkerError, lambda: model(input_ids=many))
        seconds.append(taken)
        untyped += error is None
        for pid in short:
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        wrong += not _is_right(model, expected)
    restarts = deployment_of(model).pids != pids
    model.deparallelize()
    return [
        Figure("call to the error, max, s", "max", 2.0, seconds),
        Figure("no error, or of another type", "sum", 0, [untyped]),
        Figure("wrong next answers", "sum", 0, [wrong]),
        Figure("restarts", "sum", 0, [int(restarts)]),
    ]


def limit(count: int, seed: int) -> list[Figure]:
    """Kill more workers than `max_restarts` allows, and check the weights after `deparallelize`."""
    source, expected = random.Random(seed), _wanted()
    seconds, untyped, lost = [], 0, 0
    for _ in tqdm(range(count), "limit", disable=None):
        model = parallelize(gpt2(), 2, workers={"device": "cpu", "max_restarts": 1})
        for _ in range(2):
            deployment_of(model).replicas[0].ready(time.monotonic() + _RESTART_SECONDS)
            before = deployment_of(model).pids
            os.kill(source.choice(before), signal.SIGKILL)
            while psutil.pid_exists(before[0]) or psutil.pid_exists(before[1]):
                time.sleep(0.01)
        taken, error = _seconds_to(RestartLimitError, lambda: model(**text_inputs()))  # noqa: B023 (called at once)
        seconds.append(taken)
        untyped += error is None
        with torch.no_grad():
            lost += not _is_right(model.deparallelize(), expected)
    return [
        Figure("call to RestartLimitError, max, s", "max", 1.0, seconds),
        Figure("errors of another type", "sum", 0, [untyped]),
        Figure("models that did not come back whole", "sum", 0, [lost]),
    ]


def threads(count: int, seed: int) -> list[Figure]:
    """Compare the answers to calls of many threads at once with the answers to single calls."""
    model = soak.build()
    wrong = soak.threads(model, 32, max(1, count // 32))
    model.deparallelize()
    return [Figure("answers that differ from a solo run", "sum", 0, [wrong])]
