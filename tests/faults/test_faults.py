"""Tests faults of a parallelized model: a call gives a right answer or a typed error in time, and later answers are
right."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng import deadline, parallelize
from parallelformers_ng.errors import (
    RequestTimeoutError,
    RestartLimitError,
    StaleCacheError,
    WorkerDiedError,
    WorkerError,
)
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime import forks
from tests.helpers.patience import PROMPTLY, await_incarnation, kill
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def want() -> torch.Tensor:
    return gpt2().generate(**text_inputs(), **GREEDY)


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    """Yield a model with its own workers, since tests kill and replace them."""
    model = parallelize(gpt2(), 2, workers={"device": "cpu", "timeout": 60, "max_restarts": 100})
    yield model
    model.deparallelize()


@contextlib.contextmanager
def raises_promptly(kind: type[Exception]) -> Iterator[Any]:
    """Check like `pytest.raises` that the block raises. The exception must come soon after `caught.since`, by default
    the start of the block."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        yield caught
    assert time.monotonic() - getattr(caught, "since", start) < PROMPTLY


def is_right(model: PreTrainedModel, want: torch.Tensor) -> bool:
    return torch.equal(model.generate(**text_inputs(), **GREEDY), want)


class OnToken:
    """A streamer that calls a function at the first token."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.puts = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the first put is the prompt
            self._act()

    def end(self) -> None:
        pass


def test_killed_worker_is_named_next_answer_is_right(model, want):
    pids = deployment_of(model).pids
    with raises_promptly(WorkerDiedError) as caught:

        def strike() -> None:
            os.kill(pids[1], signal.SIGKILL)
            caught.since = time.monotonic()

        model.generate(text_inputs()["input_ids"][:1], max_new_tokens=50, do_sample=False, streamer=OnToken(strike))
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)
    assert is_right(model, want)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_idle_workers_death_is_repaired_before_a_call(model, want):
    model(**text_inputs())
    before = deployment_of(model).incarnation
    cache = model(**text_inputs()).past_key_values
    model.generation_config.max_new_tokens = 8
    server = forks.running()
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)  # a restart would be over before the deadline
    try:
        kill(deployment_of(model).pids[0])
        with raises_promptly(RequestTimeoutError), deadline(0.2):
            model(**text_inputs())
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await_incarnation(model, before + 1)
    # The new workers know the configuration that the old ones were sent.
    assert torch.equal(model.generate(**text_inputs(), do_sample=False), want)
    model.generation_config.max_new_tokens = None
    with pytest.raises(StaleCacheError, match="lost when its workers restarted"):
        model(text_inputs()["input_ids"][:, -1:], past_key_values=cache)


def test_stopped_worker_times_out_and_is_replaced(model, want):
    os.kill(deployment_of(model).pids[0], signal.SIGSTOP)
    with raises_promptly(RequestTimeoutError):
        model.generate(**text_inputs(), **GREEDY, timeout=0.3)
    assert is_right(model, want)


def test_endless_callback_runs_into_the_deadline(model, want):
    def endless(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        while True:
            time.sleep(0.01)

    with raises_promptly(RequestTimeoutError), deadline(0.3):
        model.generate(**text_inputs(), **GREEDY, logits_processor=[endless])
    assert is_right(model, want)


def test_repeated_deaths_end_the_group_and_restore_weights(want):
    model = parallelize(gpt2(), 2, workers={"device": "cpu", "max_restarts": 1})
    kill(deployment_of(model).pids[1])
    await_incarnation(model, 1)
    kill(deployment_of(model).pids[1])
    for _ in range(2):
        with raises_promptly(RestartLimitError) as caught:
            model(**text_inputs())
        assert "died 2 times within 60 s" in str(caught.value)
    assert is_right(model.deparallelize(), want)


def test_weights_return_after_death_without_restart(want):
    model = parallelize(gpt2(), 2, workers={"device": "cpu", "restart": False})
    kill(deployment_of(model).pids[0])
    for _ in range(2):
        with raises_promptly(WorkerDiedError):
            model(**text_inputs())
    assert is_right(model.deparallelize(), want)


class RaiseOnce:
    """A forward hook that raises on rank 1 at its first call, or after `spared` calls."""

    def __init__(self, spared: int = 0) -> None:
        self.left = spared

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        rank = next(layer.communicator.rank for layer in module.modules() if hasattr(layer, "communicator"))
        self.left -= 1
        if rank == 1 and self.left == -1:
            raise ZeroDivisionError("a layer gave out")


@pytest.mark.parametrize("place", ["in a block", "after the last collective"])
def test_error_of_one_rank_leaves_group_working(groups, place, want):
    model, ids = gpt2(), text_inputs()["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        wanted = model(ids[:, -1:], past_key_values=cache).logits
    if place == "in a block":
        model.transformer.h[1].register_forward_pre_hook(RaiseOnce())
    else:
        model.lm_head.register_forward_hook(RaiseOnce())
    group = groups(2)
    pids = deployment_of(parallelize(model, workers=group)).pids
    with raises_promptly(ZeroDivisionError) as caught:
        model(ids, use_cache=True)
    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank == 1
    assert "raise ZeroDivisionError" in caught.value.remote_traceback
    # In that request perhaps only rank 0 made a cache; the ranks still agree on the caches' numbers, and drop it.
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    assert torch.allclose(model(ids[:, -1:], past_key_values=cache).logits, wanted, atol=1e-5)
    assert is_right(model, want)
    assert group.call_each("caches.held", [()] * 2) == [1, 1]
    assert deployment_of(model).pids == pids
    model.deparallelize()


IDS = text_inputs()["input_ids"]
BAD = {
    "no arguments": ((), {}),
    "float ids": ((IDS.float(),), {}),
    "ids that are no tensor": (("some text",), {}),
    "ids beyond the vocabulary": ((IDS + 1000,), {}),
    "negative ids": ((-IDS,), {}),
    "no rows": ((IDS[:0, :0],), {"labels": IDS}),
    "too long": ((torch.ones(1, 500, dtype=torch.long),), {}),
    "too many dimensions": ((IDS[None, None, None],), {}),
    "an unknown argument": ((IDS,), {"input_idz": IDS}),
    "a mask of another shape": ((IDS,), {"attention_mask": torch.ones(3, 3)}),
    "ids and embeddings": ((IDS,), {"inputs_embeds": torch.zeros(2, 7, 48)}),
    "embeddings of another width": ((), {"inputs_embeds": torch.zeros(2, 7, 47)}),
    "a lock": ((IDS,), {"labels": threading.Lock()}),
    "a timeout in words": ((IDS,), {"timeout": "soon"}),
}


@pytest.mark.parametrize("method", ["forward", "generate"])
def test_bad_inputs_raise_as_in_one_process(model, want, method):
    pids = deployment_of(model).pids if is_right(model, want) else None
    whole = gpt2()
    for what, (args, kwargs) in BAD.items():
        wanted, got = outcome(whole, method, args, kwargs), outcome(model, method, args, kwargs)
        if isinstance(wanted, torch.Tensor):
            assert isinstance(got, torch.Tensor), f"{what}: {got}"
            assert torch.allclose(got, wanted, atol=1e-5), what
        else:
            assert isinstance(got, Exception), f"{what} was accepted; the whole model raises {wanted!r}"
            assert str(got), what
    assert model(inputs_embeds=torch.full((1, 3, 48), torch.nan)).logits.isnan().all()
    assert is_right(model, want)
    assert deployment_of(model).pids == pids


def outcome(model: PreTrainedModel, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the logits, the tokens, or the exception."""
    try:
        with torch.no_grad():
            output = getattr(model, method)(*args, **kwargs)
    except Exception as error:  # the tests compare its kind
        return error
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_streamer_error_ends_request_on_all_ranks(model, want, kind):
    pids = deployment_of(model).pids if is_right(model, want) else None

    def stop() -> None:
        raise kind("enough")

    streamer = OnToken(stop)
    with pytest.raises(kind, match="enough"):
        model.generate(IDS[:1], max_new_tokens=50, do_sample=False, streamer=streamer)
    assert streamer.puts == 2
    assert is_right(model, want)
    assert deployment_of(model).pids == pids


def test_two_models_at_once_and_many_threads(groups, model, want):
    other = parallelize(gpt2(), workers=groups(2))
    wrong: list[Any] = []

    def work(mine: PreTrainedModel) -> None:
        wrong.extend(mine for _ in range(5) if not is_right(mine, want))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (model, other) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    other.deparallelize()


def test_nothing_is_left_after_many_cycles(groups, want):
    """The cycles are ten models on one group, and two models with their own workers."""
    me, group, model = psutil.Process(), groups(2), gpt2()

    def cycle(**options: Any) -> tuple[int, int, int]:
        parallelize(model, **options)
        assert is_right(model, want)
        model.deparallelize()
        return me.num_fds(), threading.active_count(), len(me.children(recursive=True))

    gc.collect()  # models of earlier tests
    before = cycle(workers=group)
    for _ in range(9):
        assert cycle(workers=group) == before
    for _ in range(2):
        assert cycle(num_gpus=2, workers={"device": "cpu"}) == before
