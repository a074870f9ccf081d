"""Tests models with several groups of workers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize, start_group
from parallelformers_ng.errors import GroupError, ParallelError, PlacementError, StaleCacheError
from parallelformers_ng.model.deployment import Replica
from parallelformers_ng.model.dispatcher import CallOptions
from parallelformers_ng.model.groups import group_makers
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.model.remote_module import remote_of
from parallelformers_ng.options import FitOptions, WorkerOptions
from parallelformers_ng.runtime.cores import usable_cpus
from tests.helpers.patience import PROMPTLY, await_end, await_incarnation, kill
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2

IDS = text_inputs()["input_ids"][:1]


def replicated(ranks: int = 1, replicas: int = 2, **options: Any) -> Any:
    return parallelize(gpt2(), ranks, workers={"device": "cpu", "replicas": replicas}, **options)


class Slow:
    """A streamer that blocks its call at the first token until it is released."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def put(self, _: torch.Tensor) -> None:
        self.begun.set()
        assert self.may_end.wait(60)

    def end(self) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> Any:
    """Yield a model with two replicas of one rank each."""
    with replicated() as parallel:
        yield parallel


def generate(model: Any, **more: Any) -> torch.Tensor:
    return model.generate(IDS, **{"max_new_tokens": 5, "do_sample": False, **more})


def await_busy(replicas: Sequence[Replica]) -> Replica:
    """Wait until a replica has a request, and return the replica."""
    end = time.monotonic() + PROMPTLY
    while not (busy := [replica for replica in replicas if replica.group.busy]):
        assert time.monotonic() < end
        time.sleep(0.01)
    return busy[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_replica_equals_the_whole_model(ranks: int) -> None:
    whole = gpt2()
    with torch.no_grad():
        want = whole(**text_inputs()).logits
    with replicated(ranks) as model:
        assert len(model.memory_allocated()) == len(set(deployment_of(model).pids)) == 2 * ranks
        pids = deployment_of(model).pids
        for replica in deployment_of(model).replicas:
            assert replica.group.call("ping") == list(range(ranks))
        for _ in range(2):
            assert torch.allclose(model(**text_inputs()).logits, want, atol=1e-5)
    await_end(*pids)
    with torch.no_grad():
        assert torch.equal(model(**text_inputs()).logits, want)


def test_call_goes_to_the_less_busy_replica(model: Any) -> None:
    want, first = generate(model), Slow()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, model, streamer=first)
        assert first.begun.wait(60)
        try:
            assert torch.equal(generate(model), want)  # on the busy replica it would wait forever
        finally:
            first.may_end.set()
        assert torch.equal(waiting.result(60), want)


def test_a_call_follows_its_cache(model: Any) -> None:
    whole, caches = gpt2(), []
    for _ in range(2):
        slow = Slow()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(generate, model, streamer=slow)  # now both replicas have caches
            assert slow.begun.wait(60)
            caches.append(model(IDS, use_cache=True).past_key_values)
            slow.may_end.set()
            waiting.result(60)
            caches.append(model(IDS, use_cache=True).past_key_values)
    assert len({id(cache.check()) for cache in caches}) == 2
    with torch.no_grad():
        want = whole(IDS[:, :1], past_key_values=whole(IDS, use_cache=True).past_key_values).logits
    for cache in caches:
        assert torch.allclose(model(IDS[:, :1], past_key_values=cache).logits, want, atol=1e-5)
    del cache, caches
    gc.collect()


def test_changes_by_the_caller_reach_all_replicas(model: Any) -> None:
    before = generate(model)
    model.generation_config.max_new_tokens = 3
    try:
        calls = remote_of(model).calls
        for replica in deployment_of(model).replicas:
            short = calls.dispatch(replica, "", "generate", (IDS,), {"do_sample": False}, CallOptions())
            assert torch.equal(short, before[:, : IDS.shape[1] + 3])
    finally:
        model.generation_config.max_new_tokens = None


def test_calls_that_sample_side_by_side_draw_apart(model: Any) -> None:
    first = Slow()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, model, streamer=first, do_sample=True, max_new_tokens=12)
        assert first.begun.wait(60)
        beside = generate(model, do_sample=True, max_new_tokens=12)
        first.may_end.set()
        assert not torch.equal(waiting.result(60), beside)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "tensor"), (2, "pipeline")])
def test_replicas_survive_the_death_of_one(ranks: int, strategy: str) -> None:
    with replicated(ranks, fit={"strategy": strategy}) as model:
        want, replicas = generate(model), deployment_of(model).replicas
        cache = model(IDS, use_cache=True).past_key_values
        holder = cache.check()
        with ThreadPoolExecutor(1) as pool:
            for pid in deployment_of(model).pids:  # so that the call cannot end before the death
                os.kill(pid, signal.SIGSTOP)
            waiting = pool.submit(generate, model)
            busy = await_busy(replicas)
            for pid in set(deployment_of(model).pids) - {busy.group.pids[-1]}:
                os.kill(pid, signal.SIGCONT)
            kill(busy.group.pids[-1])
            with pytest.raises(GroupError, match="died"):
                waiting.result(60)
        assert torch.equal(generate(model), want)
        await_incarnation(model, 1)
        assert [replica.incarnation for replica in replicas] == [int(each is busy) for each in replicas]
        if holder is busy:
            with pytest.raises(StaleCacheError):
                model(IDS[:, :1], past_key_values=cache)
        deployment_of(model).ping()
        assert torch.equal(generate(model), want)


def test_pipeline_replicas_may_use_all_cores() -> None:
    options = WorkerOptions(device="cpu", replicas=2)
    own = {maker.keywords["threads"] for maker in group_makers(2, options, FitOptions())[0]}
    assert own == {None}  # None divides the cores among all ranks
    makers, _ = group_makers(2, options, FitOptions("pipeline"))
    assert {maker.keywords["threads"] for maker in makers} == {max(1, usable_cpus() // 2)}


def test_threads_survive_the_death_of_a_replica() -> None:
    with replicated() as model:
        want, errors, done = generate(model), [], []

        def ask(_: int) -> None:
            for _ in range(6):
                try:
                    assert torch.equal(generate(model), want)
                    done.append(1)
                except GroupError as error:
                    errors.append(error)

        with ThreadPoolExecutor(6) as pool:
            runs = pool.map(ask, range(6))
            while len(done) < 6:
                time.sleep(0.001)
            kill(deployment_of(model).replicas[1].group.pids[0])
            list(runs)
        assert len(done) + len(errors) == 36
        assert len(errors) <= 6  # at most one call per thread


@pytest.mark.parametrize("number", [0, -1, 1.5, "two"])
def test_invalid_number_of_replicas_is_refused(number: Any) -> None:
    with pytest.raises(ParallelError, match="replicas is"):
        replicated(replicas=number)


def test_devices_are_named_for_all_replicas() -> None:
    with pytest.raises(PlacementError, match="num_gpus is 1 for each of 2 replicas, but device_ids names 1 devices"):
        parallelize(gpt2(), 1, workers={"device": "cuda", "device_ids": [0], "replicas": 2})


def test_start_group_takes_no_replicas() -> None:
    with pytest.raises(ParallelError, match="start_group takes no replicas"):
        start_group(1, replicas=2)
