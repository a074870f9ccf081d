"""Tests that hostile requests are refused, end no worker, and do not change the answers to other clients."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.chaos_http import ALLOWED, HONEST, send_hostile
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving.guard import AccessGuard
from parallelformers_ng.serving.metrics import Metrics
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.server import serving, tiny_model, tiny_tokenizer


def test_memory_of_large_bodies_is_given_back(groups, monkeypatch):
    calls = []
    monkeypatch.setattr("parallelformers_ng.serving.guard.give_back_freed", lambda: calls.append(1))
    monkeypatch.setattr("parallelformers_ng.serving.guard._CALM_SECONDS", 0.01)
    tokenizer = tiny_tokenizer()
    with (
        parallelize(tiny_model(tokenizer), workers=groups(1), batching=True) as model,
        serving(model, tokenizer) as running,
        running.client() as http,
    ):
        http.post("/v1/completions", json=HONEST)
        assert not calls
        assert http.post("/tokenize", json={"prompt": "x" * 100_000}).status_code == 400
        running.until(lambda: calls)


def test_large_bodies_are_read_one_by_one(monkeypatch):
    monkeypatch.setattr("parallelformers_ng.serving.guard.LARGE_BYTES_A_SECOND", 100_000)
    statuses, waits = asyncio.run(_statuses_and_waits(200, [b"x" * 200_000] * 3, monkeypatch))
    assert statuses == [200, 200, 503]  # the third body would wait longer than `client_timeout`
    assert waits == [0.0, 2.0]


def test_refusals_are_limited_per_second(monkeypatch):
    monkeypatch.setattr("parallelformers_ng.serving.guard.REFUSALS_A_SECOND", 10)
    monkeypatch.setattr("parallelformers_ng.serving.guard._REFUSALS_AT_ONCE", 2)
    statuses, waits = asyncio.run(_statuses_and_waits(404, [b"{}"] * 4, monkeypatch))
    assert statuses == [404] * 4
    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert asyncio.run(_statuses_and_waits(200, [b"{}"] * 4, monkeypatch)) == ([200] * 4, [])


def test_large_headers_are_refused(monkeypatch):
    headers = [(b"x", b"y" * 20_000)] * 2
    assert asyncio.run(_statuses_and_waits(200, [b"{}"], monkeypatch, headers))[0] == [431]
    assert asyncio.run(_statuses_and_waits(200, [b"{}"], monkeypatch, headers[:1]))[0] == [200]


async def _statuses_and_waits(status, bodies, monkeypatch, headers=()):
    """Send requests to a guard one after another, with a stopped clock.

    Returns:
        Status of each answer, and the delays in seconds.
    """
    statuses, waits = [], []

    async def answer(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def sleep(seconds):
        waits.append(seconds)

    async def tell(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    guard = AccessGuard(answer, ServeOptions(model="x", client_timeout=3), Metrics("x"))
    guard._giving_back = asyncio.get_running_loop().create_future()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: 50.0)
        patch.setattr("parallelformers_ng.serving.guard.asyncio.sleep", sleep)
        for body in bodies:
            messages = [{"type": "http.request", "body": body}]
            scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": list(headers)}
            await guard(scope, _then_silent(messages), tell)
    return statuses, waits


def _then_silent(messages):
    async def receive():
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


def test_hostile_requests_are_refused_without_disturbance(groups):
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
            futures = [pool.submit(send_hostile, port, random.Random(number), 12) for number in range(4)]
            for _ in range(8):
                answer = http.post("/v1/completions", json=HONEST)
                assert answer.status_code == 503 or answer.json()["choices"] == want
            outcomes = sum((future.result() for future in futures[1:]), futures[0].result())
            running.until(lambda: running.app.in_flight == 0)
            assert http.post("/v1/completions", json=HONEST).json()["choices"] == want
        assert outcomes.keys() <= ALLOWED | {"200"}, outcomes
        assert outcomes["200"] < 24, "most of the requests are hostile"
        assert deployment_of(model).pids == pids
