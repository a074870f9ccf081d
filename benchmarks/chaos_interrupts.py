"""Sends Ctrl-C at random moments of short calls, one after another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.chaos_figures import Figure
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.zoo.case import token_ids
from tests.zoo.decoders import gpt2

_LONGEST_SECONDS = 0.02  # longest time from the order to the signal: enough for some calls of each kind


@dataclass
class Outcomes:
    """The outcome of the interrupts.

    Attributes:
        interrupted: number of calls that raised KeyboardInterrupt.
        lost: number of interrupts after which the model had new workers.
        wrong: number of wrong answers to the call after an interrupt.
        errors: other errors, of an interrupted call or of the next call.
        seconds: seconds from the order of a signal to the KeyboardInterrupt.
    """

    interrupted: int = 0
    lost: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def figures(count: int, seed: int) -> list[Figure]:
    """Interrupt calls of a model on new workers, and return the figures."""
    outcome = interrupts_at_random(count, seed)
    for error in outcome.errors:
        print(f"  {error}", flush=True)
    return [
        Figure("order of a Ctrl-C to KeyboardInterrupt, max, s", "max", 1.0, outcome.seconds),
        Figure("calls that were not interrupted", "sum", 0, [count - outcome.interrupted]),
        Figure("other errors", "sum", 0, [len(outcome.errors)]),
        Figure("wrong next answers", "sum", 0, [outcome.wrong]),
        Figure("groups lost", "sum", 0, [outcome.lost]),
    ]


def interrupts_at_random(count: int, seed: int, group: WorkerGroup | None = None) -> Outcomes:
    """Send SIGINT at random moments of a model's calls, and check the next calls.

    Args:
        count: number of signals.
        seed: seed of the moments.
        group: group of two ranks; None to start a new group.
    """
    ids, model, outcome = token_ids(rows=1), gpt2(), Outcomes()
    with torch.no_grad():
        logits, tokens = model(ids).logits, _tokens(model, ids)
    _ = parallelize(model, 2, workers={"device": "cpu"}) if group is None else parallelize(model, workers=group)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: model(ids),
        lambda: _tokens(model, ids),
        lambda: model(ids[:, -1:], past_key_values=model(ids[:, :-1], use_cache=True).past_key_values),
        lambda: model(ids, use_cache=True).past_key_values.crop(-1),
        model.memory_allocated,
    )
    before = deployment_of(model).pids
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _striker(seed) as order:
            for number in tqdm(range(count), "interrupts at random", disable=None):
                ordered = time.monotonic()
                try:
                    order()
                    while True:
                        calls[number % len(calls)]()
                except KeyboardInterrupt:
                    outcome.interrupted += 1
                except Exception as error:  # any other error counts as a wrong outcome
                    outcome.errors.append(repr(error))
                    with contextlib.suppress(KeyboardInterrupt):  # the signal may still arrive
                        time.sleep(10 * _LONGEST_SECONDS)
                outcome.seconds.append(time.monotonic() - ordered)
                try:
                    right = torch.allclose(model(ids).logits, logits, atol=1e-5)
                    outcome.wrong += not (right and torch.equal(_tokens(model, ids), tokens))
                except Exception as error:  # any error of the next call counts as a wrong outcome
                    outcome.errors.append(f"next: {error!r}")
                outcome.lost += deployment_of(model).pids != before
                before = deployment_of(model).pids
    finally:
        signal.signal(signal.SIGINT, handler)
    model.deparallelize()
    return outcome


def _tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=3, do_sample=False)


_STRIKER = """
import os, random, signal, sys, time
parent, source = int(sys.argv[1]), random.Random(int(sys.argv[2]))
while sys.stdin.buffer.read(1):
    time.sleep(source.uniform(0.0, float(sys.argv[3])))
    os.kill(parent, signal.SIGINT)
"""


@contextlib.contextmanager
def _striker(seed: int) -> Iterator[Callable[[], object]]:
    """Yield a function that orders a SIGINT for this process after a random time.

    Another process sends the signal. A thread would need the interpreter lock, and would mostly send the signal while
    the lock is free.
    """
    arguments = (str(os.getpid()), str(seed), str(_LONGEST_SECONDS))
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _STRIKER, *arguments], stdin=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        order_pipe = process.stdin.fileno()
        yield lambda: os.write(order_pipe, b"!")
