"""Tests `/v1/responses` with OpenAI's own client: text, tools, schemas and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.server import ScriptedModel, serving, serving_on, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ROUTE = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CALLS = 'Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
CALLS += '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def client_of(running: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def answer_of(running: Any, stream: bool, **fields: Any) -> Response:
    client = client_of(running)
    fields = {"model": "tiny", "input": "Hello", **fields}
    if not stream:
        return client.responses.create(**fields)
    return list(client.responses.create(**fields, stream=True))[-1].response


def strictly(running: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, after a check of OpenAI's types and the sum of the deltas."""
    text = running.client().post(ROUTE, json={"input": "Hello", "stream": True, **fields}).text
    events = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS.validate_python(events[-1], strict=False)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        done = [each for each in events if each["type"] == f"response.{kind}.done"]
        for each in done:
            deltas = [
                delta["delta"]
                for delta in events
                if delta["type"] == f"response.{kind}.delta" and delta["item_id"] == each["item_id"]
            ]
            assert "".join(deltas) == each.get("text", each.get("arguments"))
    return events


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_answered(stream):
    model = ScriptedModel(TOKENIZER, "It says so.")
    with serving(model, TOKENIZER) as running:
        answer = answer_of(running, stream, instructions="Be brief.", metadata={"a": "b"}, store=True)
        assert (answer.output_text, answer.status, answer.error) == ("It says so.", "completed", None)
        assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
        assert answer.model_extra["store"] is False
        usage = answer.usage
        assert (usage.output_tokens, usage.total_tokens) == (12, usage.input_tokens + 12)
        assert usage.input_tokens == model.calls[-1]["input_ids"].shape[1]
        prompt = TOKENIZER.decode(model.calls[-1]["input_ids"][0])
        assert prompt == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHello<|end|>\n<|start|>assistant\n"
        short = answer_of(running, stream, max_output_tokens=5)
        assert (short.output_text, short.status) == ("It sa", "incomplete")
        assert short.incomplete_details.reason == "max_output_tokens"
        assert short.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items(stream):
    with serving(ScriptedModel(TOKENIZER, CALLS), TOKENIZER) as running:
        answer = answer_of(running, stream, tools=[TOOL])
        kinds = [item.type for item in answer.output]
        assert kinds == ["message", "function_call", "function_call"]
        assert answer.output_text == "Well."
        assert [json.loads(item.arguments) for item in answer.output[1:]] == [{"a": 1}, {}]
        assert len({item.call_id for item in answer.output[1:]}) == 2
        one = answer_of(running, stream, tools=[TOOL], parallel_tool_calls=False)
        assert [item.type for item in one.output] == ["message", "function_call"]
        assert len(strictly(running, tools=[TOOL])) > 10


def test_an_answer_without_text_is_an_empty_message():
    with serving(ScriptedModel(TOKENIZER, ""), TOKENIZER) as running:
        for stream in (False, True):
            answer = answer_of(running, stream)
            assert [(item.type, item.content[0].text) for item in answer.output] == [("message", "")]
    with serving(ScriptedModel(TOKENIZER, " \n"), TOKENIZER) as running:
        assert answer_of(running, False).output_text == " \n"


def test_reasoning_item_returns_to_the_prompt():
    tokenizer = tiny_tokenizer()
    fields = {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {"close": "<|end|>"}}
    tokenizer.response_template = {"start_anchor": "<|start|>assistant\n", "fields": fields}
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "+ message.content }}",
        "+ ('<think>' + message.reasoning_content if message.reasoning_content else '') + message.content }}",
    )
    model = ScriptedModel(tokenizer, "<think>Hm.</think>So.")
    with serving(model, tokenizer) as running:
        events = strictly(running)
        answer = answer_of(running, False)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "Hm."
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        assert events[-1]["response"]["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        follow = [{"role": "user", "content": "Hello"}, *(item.to_dict() for item in answer.output)]
        answer_of(running, False, input=[*follow, {"role": "user", "content": "And?"}])
        assert "<|start|>assistant\n<think>Hm.So." in TOKENIZER.decode(model.calls[-1]["input_ids"][0])


def test_a_conversation_is_its_messages_calls_and_outputs():
    model = ScriptedModel(TOKENIZER, "3")
    items = [
        {"role": "developer", "content": "Add."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}], "id": "msg_1"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    with serving(model, TOKENIZER) as running:
        assert answer_of(running, False, input=items, instructions="Be brief.").output_text == "3"
    call = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}}}}}\n</tool_call>'
    assert TOKENIZER.decode(model.calls[-1]["input_ids"][0]) == (
        "<|start|>system\nBe brief.\n\nAdd.<|end|>\n<|start|>user\n1 + 2?<|end|>\n<|start|>assistant\nI add."
        + call.format(1)
        + call.format(2)
        + "<|end|>\n<|start|>tool\n1<|end|>\n<|start|>tool\n2<|end|>\n<|start|>assistant\n"
    )


class City(BaseModel):
    city: str


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup]) -> Iterator[Any]:
    with serving_on(groups(2), TOKENIZER) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_settings_of_a_response_act(running, stream):
    """The response of a tiny model on two ranks equals its chat answer with the same settings."""
    fields = {"temperature": 0, "max_output_tokens": 9}
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 9}
    chat = running.client().post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert answer_of(running, stream, **fields).output_text == chat
    seeded = [answer_of(running, stream, max_output_tokens=9, extra_body={"seed": 4, "top_k": 9}).output_text] * 2
    assert seeded[0] == seeded[1] != chat
    forced = answer_of(running, stream, tools=[TOOL], tool_choice="required", max_output_tokens=200)
    named = answer_of(running, stream, tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    for answer in (forced, named):
        calls = [item for item in answer.output if item.type == "function_call"]
        if answer.status == "completed":
            assert calls
        assert all(json.loads(call.arguments)["a"] in (1, 2) for call in calls)
    schema = {"type": "json_schema", "name": "x", "schema": TOOL["parameters"], "strict": True}
    json_answer = answer_of(running, stream, text={"format": schema}, max_output_tokens=60)
    assert json.loads(json_answer.output_text) in ({"a": 1}, {"a": 2})
    assert json_answer.text.format.type == "json_schema"


def test_log_probabilities_are_told_if_they_are_included(running):
    fields = {"temperature": 0, "max_output_tokens": 5, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    answer = answer_of(running, False, **fields)
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == 5
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in logprobs)
    events = strictly(running, **fields)
    told = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    assert told == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert not answer_of(running, False, max_output_tokens=2, top_logprobs=2).output[0].content[0].logprobs


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id is not supported: the server stores no conversations"),
    ({"conversation": "conv_1"}, "the server stores no conversations"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"input": []}, "send 1 to"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "the model reads text"),
    ({"input": [{"role": "user"}]}, "input.0 has no content"),
    ({"input": [{"role": "user", "content": [5]}]}, "part of type None"),
    ({"input": [{"content": "x"}]}, "role"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "no message"),
    ({"input": [{"type": "function_call", "name": 5}]}, "function.name"),
    ({"input": [{"role": "poet", "content": "x"}]}, "no such role"),
    ({"tools": [{"type": "web_search"}]}, "tools of type 'web_search'"),
    ({"tools": [{"type": "function"}]}, "function.name"),
    ({"tool_choice": "required"}, "no tools"),
    ({"tool_choice": {"type": "function", "name": "fly"}, "tools": [TOOL]}, "'fly'"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}, "tools": [TOOL]},
        "name",
    ),
    ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "mcp"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "response_format"),
    ({"top_logprobs": 100, "include": ["message.output_text.logprobs"]}, "logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"presence_penalty": 5}, "presence_penalty"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED)
def test_requests_that_cannot_be_answered_are_refused(running, fields, why):
    refused = running.client().post(ROUTE, json={"input": "Hello", **fields})
    assert refused.status_code == 400, refused.text
    assert why in refused.json()["error"]["message"]


@pytest.mark.parametrize("item", [{"summary": 5}, {"content": "x"}, {"content": [{"text": 5}]}, {"content": {"a": 1}}])
def test_malformed_reasoning_is_refused(running, item):
    fields = {"input": [{"type": "reasoning", **item}, {"role": "user", "content": "x"}], "max_output_tokens": 1}
    assert running.client().post(ROUTE, json=fields).status_code in (200, 400)


def test_an_error_within_a_stream_is_an_event():
    class Failing(ScriptedModel):
        async def agenerate(self, streamer: Any, **kwargs: Any) -> None:
            streamer.put(kwargs["input_ids"])
            streamer.put(torch.tensor([5]))
            await asyncio.sleep(0.1)
            raise TimeoutError

    with serving(Failing(TOKENIZER, "It"), TOKENIZER) as running:
        events = strictly(running)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert "reached its time limit" in events[-1]["response"]["error"]["message"]


def test_nothing_is_stored():
    with serving(ScriptedModel(TOKENIZER, "So."), TOKENIZER) as running, running.client() as http:
        answer: httpx.Response = http.get(f"{ROUTE}/resp_1")
        assert answer.status_code == 404
