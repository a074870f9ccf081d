"""Tests that the limits decide how many requests of a burst are served and how many are refused."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.errors import BatchingError
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.serving.api_errors import api_error
from tests.helpers.paused_group import paused
from tests.helpers.server import Running, ScriptedModel, serving, tiny_model, tiny_tokenizer
from tests.zoo.decoders import decoder

TOKENIZER = tiny_tokenizer()
LIMITS = [(1, 1), (2, 2), (1, 7), (16, 16), (16, 48)]


async def burst(running: Running, count: int, body: dict[str, Any], ready: Any) -> list[int]:
    """Send concurrent requests and return the number of answers with status 200 and with status 503.

    Args:
        running: server to test.
        count: number of requests.
        body: JSON body of each request.
        ready: function that releases the answers; its argument is a function that returns the number of complete
            requests.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False, limits=limits) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(count)]
        await asyncio.to_thread(ready, lambda: sum(task.done() for task in tasks))
        statuses = [(await task).status_code for task in tasks]
    assert set(statuses) <= {200, 503}
    return [statuses.count(200), statuses.count(503)]


@pytest.mark.parametrize(("rows", "waiting"), LIMITS)
@pytest.mark.parametrize("count", [1, 7, 200])
def test_limits_decide_how_many_are_served(rows, waiting, count):
    model, served = ScriptedModel(TOKENIZER, "So.", holds=True), min(count, rows + waiting)
    with serving(model, TOKENIZER, rows=rows, waiting=waiting) as running:

        def ready(done: Any) -> None:
            running.until(lambda: len(model.calls) + done() >= count)
            model.release(running)

        assert asyncio.run(burst(running, count, {"prompt": "x"}, ready)) == [served, count - served]
        running.until(lambda: running.app.in_flight == 0)
        assert asyncio.run(burst(running, served, {"prompt": "x"}, lambda done: None)) == [served, 0], (
            "places are free again"
        )


@pytest.mark.parametrize(("count", "choices"), [(9, 3), (40, 4)])
def test_answers_are_counted_and_not_requests(count, choices):
    model, served = ScriptedModel(TOKENIZER, "So.", holds=True), min(count, 20 // choices)
    with serving(model, TOKENIZER, rows=4, waiting=16) as running:

        def ready(done: Any) -> None:
            running.until(lambda: len(model.calls) // choices + done() >= count)
            model.release(running)

        body = {"prompt": "x", "n": choices}
        assert asyncio.run(burst(running, count, body, ready)) == [served, count - served]


@pytest.mark.parametrize(("count", "limits"), [(7, (2, 2)), (40, (4, 8))])
def test_ranks_serve_as_many_as_limits_say(groups, count, limits):
    """The queue of real ranks accepts every request that the server has accepted."""
    options = {"rows": limits[0], "waiting": limits[1]}
    batching = BatchingOptions(**{**options, "waiting": 2 * sum(limits)})
    with (
        parallelize(tiny_model(TOKENIZER), workers=groups(2), batching=batching) as model,
        serving(model, TOKENIZER, **options) as running,
    ):
        body = {"prompt": "Hello", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        served, refused = asyncio.run(burst(running, count, body, lambda done: None))
        assert served >= min(count, sum(limits))
        assert served + refused == count
        body = {
            "prompt": "Hello",
            "max_tokens": 50,
            "temperature": 0,
            "stop": "E",
        }  # a stop string ends running calls
        with ThreadPoolExecutor(sum(limits)) as pool, running.client() as http:
            answers = list(
                pool.map(lambda _: http.post("/v1/completions", json=body).status_code, range(2 * sum(limits)))
            )
        assert set(answers) == {200}


@pytest.mark.parametrize(("rows", "waiting", "count"), [(2, 2, 7), (1, 3, 20), (4, 1, 6)])
def test_batch_takes_as_many_calls_as_allowed(groups, rows, waiting, count):
    """Calls that arrive before the first round do not count as waiting."""
    expected, refused, group = max(0, count - rows - waiting), [0], groups(1)
    with parallelize(decoder("Llama"), workers=group, batching={"rows": rows, "waiting": waiting}) as model:
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1)  # runs the proof that calls may share batches
        with paused(group) as resume, ThreadPoolExecutor(count) as pool:

            def ask(_: int) -> torch.Tensor | None:
                try:
                    return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False)
                except BatchingError:
                    refused[0] += 1
                    if refused[0] == expected:
                        resume.set()
                    return None

            answers = list(pool.map(ask, range(count)))
    assert refused == [expected]
    assert sum(answer is not None for answer in answers) == min(count, rows + waiting)


def test_errors_name_the_flag(groups):
    with (
        parallelize(decoder("Llama"), workers=groups(1), batching={"cache_tokens": 4}) as model,
        pytest.raises(BatchingError, match=r"allow more with batching=\{'cache_tokens'") as error,
    ):
        model.generate(torch.tensor([[5, 6, 7, 8, 9]]), max_new_tokens=4)
    told = api_error(error.value)
    assert (told.status, told.code) == (400, "context_length_exceeded")
    assert str(told).endswith(
        "9 tokens, and 4 are allowed; send a smaller request, or start the server with a larger --cache-tokens"
    )
