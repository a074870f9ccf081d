"""Requests that mean no good, at two ranks: each is refused, no worker ends, honest clients get their answers."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.chaos_http import ALLOWED, HONEST, send_hostile
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving.errors import ApiError
from parallelformers_ng.serving.guard import Guard
from parallelformers_ng.serving.options import ServeOptions
from tests.serving import serving, tiny_model, tiny_tokenizer


def test_memory_of_large_bodies_is_given_back(groups, monkeypatch):
    given = []
    monkeypatch.setattr("parallelformers_ng.serving.guard.give_back_freed", lambda: given.append(1))
    monkeypatch.setattr("parallelformers_ng.serving.guard._CALM_SECONDS", 0.01)
    tokenizer = tiny_tokenizer()
    with (
        parallelize(tiny_model(tokenizer), workers=groups(1), batching=True) as model,
        serving(model, tokenizer) as running,
        running.client() as http,
    ):
        http.post("/v1/completions", json=HONEST)
        assert not given
        assert http.post("/tokenize", json={"prompt": "x" * 100_000}).status_code == 400
        running.until(lambda: given)


def test_large_bodies_go_on_one_after_another(monkeypatch):
    asyncio.run(_one_after_another(monkeypatch))


async def _one_after_another(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("parallelformers_ng.serving.guard._LARGE_BYTES_A_SECOND", 1000)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 50.0)
    guard = Guard(lambda *_: None, ServeOptions(model="x", client_timeout=3))
    with monkeypatch.context() as patch:
        patch.setattr("parallelformers_ng.serving.guard.asyncio.sleep", sleep)
        for size in (1000, 2000, 500):
            await guard._turn(size)
        with pytest.raises(ApiError, match="too many large requests"):
            await guard._turn(1)
    assert waits == [0.0, 1.0, 3.0]


def test_hostile_requests_are_refused_and_disturb_nobody(groups):
    tokenizer = tiny_tokenizer()
    with parallelize(tiny_model(tokenizer), workers=groups(2), batching=True) as model:
        pids = deployment_of(model).pids
        with (
            serving(model, tokenizer, client_timeout=1, max_tokens=4) as running,
            ThreadPoolExecutor(4) as pool,
            running.client() as http,
        ):
            port = int(running.url.rpartition(":")[2])
            want = http.post("/v1/completions", json=HONEST).json()["choices"]
            sent = [pool.submit(send_hostile, port, random.Random(number), 12) for number in range(4)]
            for _ in range(8):
                answer = http.post("/v1/completions", json=HONEST)
                assert answer.status_code == 503 or answer.json()["choices"] == want
            outcomes = sum((future.result() for future in sent[1:]), sent[0].result())
            running.until(lambda: running.app.in_flight == 0)
            assert http.post("/v1/completions", json=HONEST).json()["choices"] == want
        assert outcomes.keys() <= ALLOWED | {"200"}, outcomes
        assert outcomes["200"] < 24, "most of them mean no good"
        assert deployment_of(model).pids == pids
