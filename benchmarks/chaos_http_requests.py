"""Makes hostile requests to a server: damaged, too large, of wrong types, or with schemas that need much memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any


def request(source: random.Random) -> bytes:
    """Return one hostile request, complete or incomplete."""
    return source.choice((_mangled, _headers, _body, _body, _body, _fields, _fields, _fields, _fields))(source)


def _post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close", *headers]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _mangled(source: random.Random) -> bytes:
    """Return a request with changed, removed and added bytes."""
    message = bytearray(_post("/v1/completions", json.dumps({"prompt": "x"}).encode()))
    for _ in range(source.randint(1, 8)):
        at = source.randrange(len(message))
        message[at : at + source.randint(0, 3)] = source.randbytes(source.randint(0, 3))
    return bytes(message)


def _headers(source: random.Random) -> bytes:
    body = b'{"prompt": "x"}'
    return source.choice(
        (
            _post("/v1/completions", body, f"X: {'y' * 100_000}"),
            _post("/v1/completions", body, *["X: y"] * 5000),
            _post("/v1/completions", body, length=1 << 40),
            _post("/v1/completions", body, length=-1),
            _post("/v1/completions", body, "Transfer-Encoding: chunked"),
            _post("/v1/completions", body, "Content-Type: text/plain"),
            _post("/v1/completions", body, "Authorization: Basic " + "A" * 9999),
            _post("/" + "x" * source.randint(1, 60_000), body),
            _post("/../../etc/passwd", body),
            _post("/%00%ff%2e%2e/", body),
            _post("/page.js", body),
            b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /ready HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        )
    )


def _body(source: random.Random) -> bytes:
    """Return a request with an invalid or too large body."""
    body = source.choice(
        (
            lambda: b"[" * source.randint(1, 200_000),
            lambda: b'{"a":' * source.randint(1, 50_000),
            lambda: b'{"prompt": ' + b"9" * source.randint(1, 100_000) + b"}",
            lambda: b'{"prompt": "' + b"\\ud800" * source.randint(1, 1000) + b'"}',
            lambda: source.randbytes(source.randint(0, 5000)),
            lambda: b"x" * (5 << 20),
            lambda: b'{"prompt": "' + b"x" * (900 << 10) + b'"}',
            lambda: json.dumps({"prompt": [[1]] * 10_000}).encode(),
            lambda: json.dumps({"prompt": list(range(200_000))}).encode(),
            lambda: json.dumps({"messages": [{"role": "user", "content": "x"}] * 20_000}).encode(),
        )
    )()
    return _post(source.choice(_ROUTES), body)


_ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank",
    "/tokenize", "/detokenize",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 10**30, -(10**30), 1e308, -0.0, float("nan"), float("inf"), "", "x", "\x00",
    "\ufeff", [], {}, [None], [[]], [[[]]], {"": {}}, ["x"] * 1000, [1, "x"], {"x": [1] * 1000}, "x" * 10_000, [-1],
    [10**30], "🙂" * 500,
)  # fmt: skip


def _fields(source: random.Random) -> bytes:
    """Return a request with wrong values in one to three fields."""
    body: dict[str, Any] = {"max_tokens": 4}
    chat = source.random() < 0.5
    if chat:
        body["messages"] = [{"role": "user", "content": "x"}]
    else:
        body["prompt"] = "x"
    if chat and source.random() < 0.3:
        body["messages"].append(dict(source.choices(_MESSAGE, k=3)))
    for _ in range(source.randint(1, 3)):
        body[source.choice(_NAMES)] = source.choice(_VALUES)
    if source.random() < 0.3:
        schema = source.choice(_SCHEMAS)()
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    if chat and source.random() < 0.3:
        schema = source.choice(_SCHEMAS)()
        body["tools"] = [{"type": "function", "function": {"name": "x", "parameters": schema}}]
        body["tool_choice"] = source.choice(("required", "auto", {"type": "function", "function": {"name": "x"}}))
    if chat and source.random() < 0.4:
        return _post("/v1/responses", json.dumps(_as_response(body, source)).encode())
    return _post(f"/v1/{'chat/' * chat}completions", json.dumps(body).encode())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_response(body: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """Return the fields as a request of `/v1/responses`, with up to two invalid items."""
    items: list[Any] = [{"role": "user", "content": "x"}]
    for _ in range(source.randint(0, 2)):
        kind = source.choice(("reasoning", "function_call", "function_call_output", "message", "item_reference", 5))
        field = source.choice(("content", "output", "arguments", "summary", "call_id", "name"))
        items.insert(0, {"type": kind, field: source.choice(_VALUES)})
    offered = [each.get("function") for each in _list(body.get("tools")) if isinstance(each, dict)]
    tools = [{"type": "function", **dict(each or {})} for each in offered]
    known = {name: value for name, value in body.items() if name not in ("messages", "tools", "max_tokens")}
    return {**known, "input": items, "tools": tools, "max_output_tokens": 4}


_NAMES = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs", "repetition_penalty", "response_format",
    "tools", "tool_choice", "parallel_tool_calls", "frequency_penalty", "echo",
    "logit_bias", "presence_penalty", "best_of", "suffix", "unknown", "__class__",
)  # fmt: skip
_MESSAGE: tuple[tuple[str, Any], ...] = (
    ("role", "{{ 7 * 7 }}"), ("role", None), ("content", "{% for i in range(10**9) %}{% endfor %}"), ("content", None),
    ("content", [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), ("tool_calls", [{}]),
    ("tool_calls", [{"function": {"name": "x", "arguments": "[" * 5000}}]), ("role", "user"), ("name", {"x": 1}),
)  # fmt: skip


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


_SCHEMAS: tuple[Callable[[], dict[str, Any]], ...] = (
    lambda: {"type": "string", "pattern": "(((a{0,99}){0,99}){0,99}){0,99}b"},
    lambda: {"type": "string", "pattern": "(a*)*" * 50 + "x"},
    lambda: {"type": "string", "pattern": "("},
    lambda: {"type": "string", "pattern": "(?=a)(?<!b)\\1"},
    lambda: {"type": "string", "pattern": "(.*a.{18}b)|(.*b.{19}a)"},
    lambda: {"enum": [f"x{number}" for number in range(20_000)]},
    lambda: {"type": "object", "properties": {f"p{number}": {} for number in range(5000)}},
    lambda: {"anyOf": [{"type": "object", "required": [f"a{number}"]} for number in range(3000)]},
    lambda: {"$ref": "#"},
    lambda: {"$ref": "file:///etc/passwd"},
    lambda: {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
    lambda: _deep(100),
    lambda: _deep(400),
    lambda: {"type": "array", "minItems": 10**9},
    lambda: {"type": "integer", "multipleOf": 1e-300},
    lambda: {"type": 7},
)
