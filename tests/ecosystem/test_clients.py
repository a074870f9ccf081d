"""Tests clients of OpenAI's API with SmolLM2 on the server: forced tools, schemas, streams, `/v1/responses`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import agents
import instructor
import litellm
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.helpers.server import Running, serving

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ANSWERS = [{"city": "Paris"}, {"city": "Rome"}]


class City(BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "Rome"]


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "answer", "description": "Answers.", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def running(language_model) -> Iterator[Running]:
    with serving(language_model.cut, language_model.tokenizer, model=MODEL, max_tokens=60) as server:
        yield server


@pytest.fixture(scope="module")
def url(running: Running) -> str:
    return f"{running.url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


SHOWN: Any = [
    {"role": "user", "content": "The capital of Italy?"},
    {"role": "assistant", "content": '{"city": "Rome"}'},
    {"role": "user", "content": "The capital of Italy?"},
    {"role": "assistant", "content": '{"city": "Rome"}'},
    {"role": "user", "content": "The capital of Italy?"},
]
"""Messages that show a small model what to write if no schema constrains it."""
CHOICES: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "answer"}},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("stream", [False, True])
def test_openai_chats(client, choice, stream) -> None:
    arguments = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": CHOICES[choice],
        "temperature": 0,
    }
    arguments["parallel_tool_calls"] = False
    if stream:
        with client.chat.completions.stream(**arguments) as chunks:
            message = chunks.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**arguments).choices[0].message
    assert [json.loads(call.function.arguments) in ANSWERS for call in message.tool_calls] == [True]


def test_openai_parses_chats_and_responses(client) -> None:
    chat = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, temperature=0)
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, temperature=0)
    assert chat.choices[0].message.parsed.model_dump() in ANSWERS
    assert response.output_parsed.model_dump() in ANSWERS


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responds(client, stream) -> None:
    flat = {"type": "function", **TOOL["function"], "strict": True}
    arguments = {"model": MODEL, "input": QUESTION, "tools": [flat], "tool_choice": "required", "temperature": 0}
    arguments["parallel_tool_calls"] = False
    if stream:
        with client.responses.stream(**arguments) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.create(**arguments)
    assert json.loads(answer.output[0].arguments) in ANSWERS
    turns = [
        {"role": "user", "content": QUESTION},
        *(item.to_dict(exclude_none=True) for item in answer.output),
        {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "Paris it is."},
    ]
    for each in turns:
        each.pop("parsed_arguments", None)
    assert client.responses.create(model=MODEL, input=turns, temperature=0, max_output_tokens=9).output_text


@tool
def answer(city: Literal["Paris", "Rome"]) -> str:
    """Answers with a city."""
    return city


def langchain(url: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0, temperature=0, **settings)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_calls_any_tool(url, responses) -> None:
    chat = langchain(url, use_responses_api=responses).bind_tools([answer], tool_choice="any")
    chunks = list(chat.stream(QUESTION))
    for got in (chat.invoke(QUESTION), sum(chunks[1:], chunks[0])):
        assert got.tool_calls
        assert all(call["name"] == "answer" and call["args"]["city"] in ("Paris", "Rome") for call in got.tool_calls)


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_langchain_gets_structured_output(url, method) -> None:
    chat = langchain(url).with_structured_output(City if method != "json_mode" else None, method=method)
    got = chat.invoke(QUESTION if method != "json_mode" else "Answer in JSON: {}")
    assert isinstance(got, dict) if method == "json_mode" else got.model_dump() in ANSWERS


def test_langchain_responds(url) -> None:
    chat = langchain(url, use_responses_api=True, max_completion_tokens=9)
    chunks = list(chat.stream(QUESTION))
    assert chat.invoke(QUESTION).text == sum(chunks[1:], chunks[0]).text != ""


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(url, stream) -> None:
    arguments = {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": url,
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
    }
    got = litellm.completion(
        **arguments, tools=[TOOL], tool_choice="required", stream=stream, parallel_tool_calls=False
    )
    if stream:
        got = litellm.stream_chunk_builder(list(got))
    assert [json.loads(call.function.arguments) in ANSWERS for call in got.choices[0].message.tool_calls] == [True]
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    text = litellm.completion(**arguments, response_format=schema).choices[0].message.content
    assert json.loads(text) in ANSWERS


def test_llama_index(url) -> None:
    llm = OpenAILike(
        model=MODEL, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True, temperature=0,
        max_tokens=100, max_retries=0,
    )  # fmt: skip
    assert llm.chat([ChatMessage(QUESTION)]).message.content
    assert "".join(chunk.delta for chunk in llm.stream_chat([ChatMessage(QUESTION)]))
    assert llm.as_structured_llm(City).complete(QUESTION).raw.model_dump() in ANSWERS
    function = FunctionTool.from_defaults(fn=answer.func, name="answer", fn_schema=City)
    called = llm.chat_with_tools([function], user_msg=QUESTION, tool_required=True)
    assert all(call.tool_kwargs["city"] in ("Paris", "Rome") for call in llm.get_tool_calls_from_response(called))


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA])
def test_instructor(client, mode) -> None:
    wrapped = instructor.from_openai(client, mode=mode)
    got = wrapped.create(model=MODEL, messages=SHOWN, response_model=City, temperature=0, max_retries=0)
    assert got.model_dump() in ANSWERS


def agent(url: str, **settings: Any) -> agents.Agent[None]:
    """Return an agent with the library's defaults and this address; it calls `/v1/responses`."""
    agents.set_default_openai_client(
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0), use_for_tracing=False
    )
    agents.set_tracing_disabled(True)
    return agents.Agent(name="Guide", instructions="Be brief.", model=MODEL, **settings)


BRIEF = {"model_settings": agents.ModelSettings(temperature=0)}  # greedy, so that answers end after a few words


def test_agents_answer(url) -> None:
    assert agents.Runner.run_sync(agent(url, **BRIEF), QUESTION).final_output
    structured = agents.Runner.run_sync(agent(url, output_type=City), QUESTION)
    assert structured.final_output.model_dump() in ANSWERS


def test_agents_call_tools(url) -> None:
    called: list[str] = []

    @agents.function_tool
    def look_up(city: Literal["Paris", "Rome"]) -> str:
        """Looks a city up."""
        called.append(city)
        return f"{city} is a capital."

    settings = agents.ModelSettings(tool_choice="required", temperature=0, parallel_tool_calls=False)
    asking_agent = agent(url, tools=[look_up], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    result = agents.Runner.run_sync(asking_agent, QUESTION)
    assert called
    assert result.final_output == f"{called[0]} is a capital."


async def _streamed(url: str) -> str:
    text = ""
    result = agents.Runner.run_streamed(agent(url, **BRIEF), QUESTION)
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert text == result.final_output
    return text


def test_agents_stream(url) -> None:

    assert asyncio.run(_streamed(url))
