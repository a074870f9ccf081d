"""Tests requests to a server whose model generates a fixed text."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.helpers.server import END, Running, ScriptedModel, serving, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = (
    'Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER, waiting=4, rows=2) as server:
        yield server


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_read(stream):
    with serving(ScriptedModel(TOKENIZER, CALLS), TOKENIZER) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        if stream:
            with client.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as chunks:
                answer = chunks.get_final_completion()
        else:
            answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        choice = answer.choices[0]
        called = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert called == [("add", {"a": 1}), ("add", {})]
        assert len({call.id for call in choice.message.tool_calls}) == 2
        assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
        plain = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none")
        assert plain.choices[0].message.content == CALLS


def test_small_packets_are_sent_at_once(running, http):
    http.get("/health")
    connections = [each.transport.get_extra_info("socket") for each in running.server.server_state.connections]
    assert connections
    assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in connections)


def test_calls_and_their_results_reach_the_prompt(http):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    reply = http.post("/tokenize", json={"messages": messages}).json()
    text = TOKENIZER.decode(reply["tokens"])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<|start|>tool\n2" in text


def test_reasoning_is_told_apart():
    tokenizer = tiny_tokenizer()
    fields = {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {"close": END}}
    tokenizer.response_template = {"start_anchor": "assistant\n", "fields": fields}
    with serving(ScriptedModel(tokenizer, "<think>hm</think>So."), tokenizer) as running, running.client() as http:
        message = http.post("/v1/chat/completions", json={"messages": HELLO}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "So.")


def test_stream_has_events_and_ends_with_done(http):
    answer = http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == "It says so."


def test_inactive_known_fields_are_refused(http):
    taken = {"user": "me", "store": True, "metadata": {}, "best_of": 1}
    assert http.post("/v1/completions", json={"prompt": "x", **taken}).status_code == 200
    for name, value in (("suffix", "y"), ("best_of", 2)):
        refused = http.post("/v1/completions", json={"prompt": "x", name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


REFUSED = [
    ("POST", "/v1/completions", {"prompt": ""}, 400, "no tokens"),
    ("POST", "/v1/completions", {"prompt": []}, 400, "no prompt"),
    ("POST", "/v1/completions", {}, 400, "prompt"),
    ("POST", "/v1/completions", {"prompt": "x" * 600}, 400, "600 tokens"),
    ("POST", "/v1/completions", {"prompt": "x" * 60_000}, 400, "60000 characters"),
    ("POST", "/v1/completions", {"prompt": [1, 2, 99999]}, 400, "99999"),
    ("POST", "/v1/completions", {"prompt": [1, -2]}, 400, "prompt"),
    ("POST", "/v1/completions", {"prompt": "\ud800"}, 400, "tokenizer"),
    ("POST", "/v1/completions", {"prompt": "x", "n": 17}, 400, "limit is 16"),
    ("POST", "/v1/completions", {"prompt": ["x"] * 17}, 400, "limit is 16"),
    ("POST", "/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "limit is 16"),
    ("POST", "/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop string"),
    ("POST", "/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "limit is 20"),
    ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("POST", "/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
    ("POST", "/v1/completions", {"prompt": "x", "seed": 1 << 80}, 400, "seed"),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, 404, "no model 'other'"),
    ("POST", "/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "poet", "content": "x"}]}, 400, "no such role"),
    ("POST", "/v1/chat/completions", {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    ("POST", "/v1/embeddings", {"input": "x"}, 400, "no embeddings"),
    ("POST", "/tokenize", {}, 400, "prompt and messages"),
    ("GET", "/v1/completions", None, 405, "does not accept GET"),
    ("DELETE", "/health", None, 405, "does not accept DELETE"),
    ("GET", "/no/such/thing", None, 404, "no route has the path"),
    ("GET", "/v1/models/other", None, 404, "other"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "why"), REFUSED)
def test_refusals_have_the_shape_of_openai(http, method, path, body, status, why):
    headers = {"Content-Type": "application/json"}
    answer = http.request(method, path, content=None if body is None else json.dumps(body), headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error.keys()) == (status, {"message", "type", "param", "code"})
    assert why in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": 1' + b"0" * 9999 + b"}",
    ],
)
def test_malformed_bodies_are_refused(http, body):
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_too_large_body_is_refused_unread():
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, max_body_bytes=1000) as running, running.client() as http:
        assert http.post("/v1/completions", content=b"x" * 1001).status_code == 413
        chunks = (b"x" * 100 for _ in range(11))
        assert http.post("/v1/completions", content=chunks).status_code == 413
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            assert b"413" in raw.recv(1 << 16).splitlines()[0]


def test_slow_and_silent_clients_are_disconnected():
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, client_timeout=0.2) as running:
        for request in (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
            b"POST /v1/comp",
            b"",
        ):
            with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as raw:
                raw.settimeout(20)
                raw.sendall(request)
                said = b""
                while part := raw.recv(1 << 16):
                    said += part
                assert b"408" in said if b"{" in request else not said


def test_client_that_reads_nothing_is_dropped():
    model = ScriptedModel(TOKENIZER, "x" * 400)
    with serving(model, TOKENIZER, client_timeout=0.2, max_choices=64, waiting=64) as running:
        body = json.dumps({"prompt": ["y"] * 64, "stream": True, "logprobs": 20, "max_tokens": 400}).encode()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            raw.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            running.until(lambda: model.calls)
            running.until(lambda: running.app.in_flight == 0)


def test_a_key_opens_all_but_health():
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, api_key="the key") as running, running.client() as http:
        basic = base64.b64encode(b"anybody:the key").decode()
        for path in ("/ready", "/metrics", "/v1/models", "/", "/status", "/openapi.json", "/nothing"):
            for wrong in (
                {},
                {"Authorization": "Bearer the ke"},
                {"Authorization": "Basic %%%"},
                {"Authorization": "the key"},
            ):
                refused = http.get(path, headers=wrong)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            for right in ("Bearer the key", f"Basic {basic}"):
                assert http.get(path, headers={"Authorization": right}).status_code != 401
        assert http.get("/health").status_code == 200
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="another", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_pages_of_other_origins_need_permission(http):
    preflight = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/completions", headers=preflight).headers
    options = {"cors": ["https://example.org"], "api_key": "k"}
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, **options) as running, running.client() as client:
        allowed = client.options("/v1/completions", headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://example.org")
        assert client.options("/v1/models", headers={**preflight, "Origin": "https://example.com"}).status_code == 400


def test_forms_of_other_pages_are_refused(http):
    """Browsers send forms and plain text to any server without a preflight, so the server must refuse these types."""
    body = json.dumps({"prompt": "x"})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert http.post("/v1/completions", content=body, headers={"Content-Type": kind}).status_code == 400


def test_requests_beyond_the_queue_are_refused():
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)
    with serving(model, TOKENIZER, rows=2, waiting=4) as running, ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(running.client().post, "/v1/completions", json={"prompt": "x"}) for _ in range(6)]
        running.until(lambda: len(model.calls) == 6)
        refused = running.client().post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "overloaded"
        assert running.client().post("/v1/completions", json={"prompt": "x", "n": 3}).status_code == 503
        model.release(running)
        assert [future.result().json()["choices"][0]["text"] for future in futures] == ["It says so."] * 6


def test_a_request_has_its_time():
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)
    with serving(model, TOKENIZER, timeout=0.2) as running:
        late = running.client().post("/v1/completions", json={"prompt": "x"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
        running.until(lambda: model.cancelled == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_call(stream):
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)

    async def ask_and_go(running: Running) -> None:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
            body = {"prompt": "x", "n": 2, "stream": stream}
            asking = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(5)]
            while len(model.calls) < 10:
                await asyncio.sleep(0.005)
            for task in asking:
                task.cancel()

    with serving(model, TOKENIZER) as running:
        asyncio.run(ask_and_go(running))
        running.until(lambda: model.cancelled == 10)
        running.until(lambda: running.app.in_flight == 0)
        metrics = running.client().get("/metrics").text
        assert 'vllm:num_requests_waiting{model_name="tiny"} 0.0' in metrics


def test_running_requests_complete_after_sigterm_others_are_refused(caplog):
    caplog.set_level("INFO")
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)
    with serving(model, TOKENIZER) as running, ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(running.client().post, "/v1/completions", json={"prompt": "x", "stream": number % 2 == 0})
            for number in range(8)
        ]
        running.until(lambda: len(model.calls) == 8)
        running.loop.call_soon_threadsafe(running.server.handle_exit, signal.SIGTERM, None)
        running.until(lambda: running.app.draining)
        refused = running.client().post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert running.client().get("/ready").status_code == 503
        assert running.client().get("/health").status_code == 200
        model.release(running)
        assert all("so." in future.result().text or "DONE" in future.result().text for future in futures)
        running.thread.join(20)
        assert not running.thread.is_alive()
        assert "8 running requests" in caplog.text


def test_a_second_signal_ends_the_server_at_once():
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)
    with serving(model, TOKENIZER) as running, ThreadPoolExecutor(1) as pool:
        future = pool.submit(running.client().post, "/v1/completions", json={"prompt": "x"})
        running.until(lambda: model.calls)
        for _ in range(2):
            running.loop.call_soon_threadsafe(running.server.handle_exit, signal.SIGINT, None)
        running.thread.join(20)
        assert not running.thread.is_alive()
        with pytest.raises(httpx.HTTPError):
            future.result().raise_for_status()
