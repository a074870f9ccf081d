"""Tests OpenAI's official client with a tiny model on two ranks."""

from __future__ import annotations

import asyncio
import copy
import json
import struct
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import BertConfig, BertModel

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.sentence_modules import Pooling
from tests.helpers.patience import await_incarnation, kill
from tests.helpers.server import Running, serving, serving_on, tiny_model, tiny_tokenizer
from tests.zoo.build import build

TOKENIZER = tiny_tokenizer()
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def whole() -> Any:
    return tiny_model(TOKENIZER)


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup]) -> Iterator[Running]:
    with serving_on(groups(2), TOKENIZER) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def generated(whole: Any, prompt: str, seed: int | None = None, **settings: Any) -> list[int]:
    """Return the tokens that one process generates."""
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    if seed is not None:
        torch.manual_seed(seed)
    return whole.generate(ids, do_sample=seed is not None, **settings)[0, ids.shape[1] :].tolist()


def text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_a_completion_has_the_tokens_of_one_process(client, whole):
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=12, temperature=0)
    tokens = generated(whole, "Hello", max_new_tokens=12)
    assert answer.choices[0].text == text(tokens)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", len(tokens))
    assert (answer.object, answer.model, answer.usage.prompt_tokens) == ("text_completion", "tiny", 5)


def test_settings_and_seeds_are_those_of_each_answer(client, whole):
    settings = {"top_p": 0.9, "temperature": 0.8}
    extra = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2}
    arguments = {"model": "tiny", "prompt": ["Hello", "World"], "max_tokens": 9, "n": 2, "seed": 5, **settings}
    answer = client.completions.create(**arguments, extra_body=extra)
    want = [
        text(generated(whole, prompt, seed, max_new_tokens=9, **settings, **extra))
        for prompt in ("Hello", "World")
        for seed in (5, 6)
    ]
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    without = [client.completions.create(model="tiny", prompt="Hello", max_tokens=9).choices[0].text for _ in range(2)]
    assert without[0] != without[1]


def test_streamed_chat_equals_the_whole_answer(client):
    arguments = {"model": "tiny", "messages": HELLO, "max_tokens": 15, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**arguments)
    texts, finish, usage = ["", ""], {}, None
    for chunk in client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finish[choice.index] = choice.finish_reason
        if chunk.usage:
            assert not chunk.choices
            usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert finish == {0: "length", 1: "length"}
    assert usage == whole.usage


def test_an_answer_ends_before_a_stop_string(client, whole):
    all_of_it = client.completions.create(model="tiny", prompt="Hello", max_tokens=30, temperature=0).choices[0].text
    stop = all_of_it[7:9]
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=30, temperature=0, stop=[stop, "no"])
    assert answer.choices[0].text == all_of_it[: all_of_it.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 30


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_are_the_models(client, whole, stream):
    arguments = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = client.chat.completions.create(**arguments, stream=stream)
    chosen = [
        each
        for choice in ([chunk.choices[0] for chunk in answer] if stream else answer.choices)
        if choice.logprobs
        for each in choice.logprobs.content
    ]
    prompt = TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    ids = TOKENIZER(prompt)["input_ids"]
    tokens = generated(whole, prompt, max_new_tokens=5)
    logprobs = whole(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    values = torch.tensor([each.logprob for each in chosen])
    assert torch.allclose(values, logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    top = torch.tensor([[one.logprob for one in each.top_logprobs] for each in chosen])
    assert torch.allclose(top, logprobs.topk(3).values, rtol=1e-4, atol=1e-4)


def test_echoed_prompt_has_its_probabilities(client, whole):
    ids = TOKENIZER("Hello")["input_ids"]
    arguments = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    choice = client.completions.create(**arguments).choices[0]
    assert choice.text.startswith("Hello")
    assert choice.logprobs.token_logprobs[0] is None
    logprobs = whole(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
    want = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs[1:5] == pytest.approx(want, rel=1e-4)
    assert choice.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
    assert len(choice.logprobs.tokens) == 6


def test_an_answer_meets_its_schema(client):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    arguments = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "response_format": form}
    for seed in range(3):
        choice = client.chat.completions.create(**arguments, seed=seed).choices[0]
        assert json.loads(choice.message.content).keys() == {"a", "b"}
        assert choice.finish_reason == "stop"


def test_many_callers_get_their_own_answers(running, whole):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            calls = [
                client.completions.create(model="tiny", prompt=f"Number {number}", max_tokens=8, temperature=0)
                for number in range(16)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    want = [text(generated(whole, f"Number {number}", max_new_tokens=8)) for number in range(16)]
    assert asyncio.run(ask()) == want


def test_status_routes_describe_the_server(running, client):
    http = running.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    client.completions.create(model="tiny", prompt="Hello", max_tokens=3)
    lines = http.get("/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(figures['vllm:generation_tokens_total{model_name="tiny"}']) >= 3
    assert float(figures['vllm:time_to_first_token_seconds_count{model_name="tiny"}']) >= 1
    assert float(figures['vllm:num_requests_running{model_name="tiny"}']) == 0
    running.until(lambda: http.get("/status").json()["memory_bytes"].keys() == {"cpu:0", "cpu:1"})
    plan = http.get("/plan").json()
    assert sum(part["bytes"] for part in plan["parts"]) == plan["bytes_whole"]
    assert [sum(column) for column in zip(*(part["ranks"] for part in plan["parts"]), strict=True)] == plan[
        "bytes_per_rank"
    ]
    reply = http.post("/tokenize", json={"prompt": "Hello"}).json()
    assert (reply["tokens"], reply["count"]) == (TOKENIZER("Hello")["input_ids"], 5)


def test_worker_death_fails_its_request_only(groups):
    def rank() -> int:
        return model_deployment.pids[0]

    from parallelformers_ng.model.parallelized import deployment_of

    with parallelize(tiny_model(TOKENIZER), 2, batching=True, workers={"device": "cpu"}) as model:
        model_deployment = deployment_of(model)
        with serving(model, TOKENIZER) as running, running.client() as http:
            arguments = {"prompt": "Hello", "max_tokens": 450, "temperature": 0, "stream": True}
            with http.stream("POST", "/v1/completions", json=arguments) as stream:
                lines = stream.iter_lines()
                assert json.loads(next(lines)[6:])["choices"][0]["text"]
                kill(rank())
                rest = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
            assert rest[-1]["error"]["code"] == "WorkerDiedError"
            await_incarnation(model, 1)
            assert http.get("/ready").status_code == 200
            again = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4})
            assert again.status_code == 200


@pytest.fixture(scope="module")
def encoder() -> Any:
    config = BertConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return build(BertModel, config)


def test_embeddings_are_those_of_one_process(groups, encoder):
    texts = ["Hello", "a longer text of many tokens", "x"]
    want = []
    for each in texts:
        inputs = TOKENIZER(each, return_tensors="pt", return_token_type_ids=False)
        want.append(Pooling()(encoder(**inputs).last_hidden_state, inputs["attention_mask"])[0])
    with (
        parallelize(copy.deepcopy(encoder), workers=groups(2)) as model,
        serving(model, TOKENIZER, Kind(Pooling())) as running,
    ):
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        answer = client.embeddings.create(model="tiny", input=texts)  # the client requests base64
        floats = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="token ids"):
            client.embeddings.create(model="tiny", input=[[1, 2, 3]])
        with pytest.raises(openai.BadRequestError, match="limit is 64"):
            client.embeddings.create(model="tiny", input="x" * 65)
        with pytest.raises(openai.BadRequestError, match="generates no text"):
            client.completions.create(model="tiny", prompt="Hello")
        raw = running.client().post("/v1/embeddings", json={"input": "Hello", "encoding_format": "base64"}).json()
    assert torch.allclose(torch.tensor([one.embedding for one in answer.data]), torch.stack(want), atol=1e-5)
    assert torch.allclose(torch.tensor(floats.data[0].embedding), want[0], atol=1e-5)
    packed = b64decode(raw["data"][0]["embedding"])
    assert struct.unpack(f"<{len(packed) // 4}f", packed) == pytest.approx(floats.data[0].embedding)
    assert answer.usage.prompt_tokens == sum(len(TOKENIZER(each)["input_ids"]) for each in texts)
