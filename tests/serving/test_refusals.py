"""Tests that a client learns the cause of a refusal, and that harmless parts of an agent's requests are accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from parallelformers_ng.serving import logs
from parallelformers_ng.serving.fields import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES
from tests.helpers.server import ScriptedModel, serving, tiny_tokenizer
from tests.serving.test_operators import logged

TOKENIZER = tiny_tokenizer()
HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
READS_CALLS = {
    "start_anchor": "<tool_call>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
            "transform": {
                "type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}
            },
        },
        "content": {"content": "text"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER) as running, running.client() as client:
        yield client


def refusal(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        ('{"prompt": "x"}', "application/x-www-form-urlencoded", "content type 'application/x-www-form-urlencoded'"),
        ('{"prompt": "x"}', "text/plain", "send JSON with the header Content-Type: application/json"),
        ('{"prompt": "x"}', "", "the body has the content type ''"),
        ('{"prompt": "x" "n": 1}', "application/json", "not valid JSON: Expecting ',' delimiter at character 15"),
        ("", "application/json", "the body is no JSON object"),
        ("[1]", "application/json", "the body is no JSON object"),
    ],
)
def test_body_that_is_no_json_is_explained(http, body, kind, why):
    assert why in refusal(http.post(COMPLETIONS, content=body, headers={"Content-Type": kind} if kind else {}))


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completion"])
def test_wrong_base_url_names_the_route(http, path):
    assert "(did you mean '/v1/chat/completions'?)" in refusal(http.post(path, json={}), 404)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "text"}], "a part of type 'text' without the field 'text'"),
        ([{"type": "image_url", "image_url": "data:image/png;base64,AA=="}], "the model reads text"),
        ([{"type": "input_audio"}], "part of type 'input_audio'; the model reads text"),
        ([{"text": "x"}], "messages.0.content.0.type: Field required"),
    ],
)
def test_part_of_a_message_is_explained(http, content, why):
    assert why in refusal(http.post(CHAT, json={"messages": [{"role": "user", "content": content}]}))


@pytest.mark.parametrize(
    ("route", "field"),
    [
        (CHAT, {"best_of": 2}),
        (CHAT, {"repeat_penalty": 1.1}),
        (COMPLETIONS, {"mirostat": 2}),
        (COMPLETIONS, {"typical_p": 0.5}),
        (COMPLETIONS, {"dry_multiplier": 0.8}),
        (COMPLETIONS, {"max_new_tokens": 5}),
        (CHAT, {"enable_thinking": False}),
        (RESPONSES, {"max_tokens": 5}),
        (EMBEDDINGS, {"input_type": "query"}),
        (RERANK, {"max_tokens_per_doc": 5}),
    ],
)
def test_fields_of_other_servers_are_refused(http, route, field):
    body: dict[str, Any] = {"messages": HELLO, "prompt": "x"} if route in (CHAT, COMPLETIONS) else {"input": "x"}
    body |= {"query": "x", "documents": ["y"]} if route == RERANK else {}
    body = {name: value for name, value in body.items() if (route, name) != (CHAT, "prompt")}
    assert f"{next(iter(field))} is not supported: " in refusal(http.post(route, json={**body, **field}))


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, ["yes", "no"]),
        ({"json_schema": {"enum": ["so"]}}, ['"so"']),
    ],
)
def test_grammars_of_llama_cpp_act(fields, texts, groups):
    from parallelformers_ng import parallelize
    from tests.helpers.server import tiny_model

    with (
        parallelize(tiny_model(TOKENIZER), workers=groups(2), batching=True) as model,
        serving(model, TOKENIZER) as running,
        running.client() as client,
    ):
        answer = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 20, **fields}).json()
        assert answer["choices"][0]["text"] in texts
        assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "grammar": ""}).status_code == 200


def test_unknown_field_is_logged_once(http, monkeypatch):
    monkeypatch.setattr(logs, "_noted", set())
    with logged("text") as out:
        for _ in range(2):
            assert http.post(COMPLETIONS, json={"prompt": "x", "temprature": 0, "user": "me"}).status_code == 200
        assert http.post(COMPLETIONS, json={"prompt": "x", "n\n": 0, **{f"x{n}": 1 for n in range(300)}}).is_success
    lines = [line for line in out.getvalue().splitlines() if "unknown field" in line]
    assert lines[0].endswith(
        "/v1/completions: the server ignores the unknown field 'temprature' (did you mean 'temperature'?)"
    )
    assert len(lines) == 256  # clients cannot fill the log


def test_log_line_of_a_refusal_says_why():
    with logged("text") as out, serving(ScriptedModel(TOKENIZER), TOKENIZER) as running, running.client() as client:
        client.post(COMPLETIONS, json={"prompt": "x", "n": 99})
        client.get("/health")
    refused, probe = [
        line for line in out.getvalue().splitlines() if "'/v1/completions'" in line or "'/health'" in line
    ]
    assert "POST '/v1/completions' 400: end after 0." in refused
    assert refused.endswith(": 'n: the request needs 99, but the limit is 16'")
    assert probe.endswith(" s")
    assert "tokens" not in probe


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"messages": HELLO, "verbosity": "low"}),
        (CHAT, {"messages": HELLO, "tools": [CUSTOM, ADD]}),
        (RESPONSES, {"input": "Hi", "text": {"verbosity": "low"}}),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "custom", "name": "p"}, {"type": "function", "name": "f"}]}),
        (
            CHAT,
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": ""}}]},
                    {"role": "tool", "content": "0"},
                ]
            },
        ),
    ],
)
def test_requests_of_agents_are_answered(http, route, fields):
    answer = http.post(route, json=fields)
    assert answer.status_code == 200, answer.text


def test_custom_tools_alone_are_refused(http):
    assert "tools.0.type" in refusal(http.post(CHAT, json={"messages": HELLO, "tools": [CUSTOM]}))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_new_tokens(http, stream):
    answer = http.post(COMPLETIONS, json={"prompt": ["Hi", "Yo"], "max_tokens": 0, "echo": True, "stream": stream})
    assert answer.status_code == 200, answer.text
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        texts, ends = {0: "", 1: ""}, []
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
            ends.append(choice["finish_reason"])
        assert (texts, ends) == ({0: "Hi", 1: "Yo"}, [None, None, "length", "length"])
    else:
        assert [each["text"] for each in answer.json()["choices"]] == ["Hi", "Yo"]
        assert answer.json()["usage"]["completion_tokens"] == 0
    assert "needs echo" in refusal(http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 0}))


@pytest.mark.parametrize("fields", [{}, {"tools": [ADD], "tool_choice": "none"}])
def test_answer_without_tools_has_no_calls(fields):
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = READS_CALLS
    with serving(ScriptedModel(tokenizer, CALL), tokenizer) as running, running.client() as client:
        choice = client.post(CHAT, json={"messages": HELLO, **fields}).json()["choices"][0]
        assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": CALL}, "stop")
        called = client.post(CHAT, json={"messages": HELLO, "tools": [ADD]}).json()["choices"][0]
        assert called["message"]["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("stream", [False, True])
def test_forced_call_cut_off_is_no_text(stream):
    said = ScriptedModel(TOKENIZER, '{"name": "add", "arguments": {}}')
    with serving(said, TOKENIZER) as running, running.client() as client:
        body = {"messages": HELLO, "tools": [ADD], "max_tokens": 12, "stream": stream}
        body["tool_choice"] = {"type": "function", "function": {"name": "add"}}
        answer = client.post(CHAT, json=body)
        assert '"length"' in answer.text
        assert "name" not in answer.text


def test_head_is_get_without_a_body(http):
    for path in ("/health", "/v1/models", "/"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == http.get(path).headers["content-length"]
