"""Describes tools in plain messages, and forces and parses tool calls that are plain JSON without markers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from parallelformers_ng.serving.tools import BareForm, Read, openai_call

_SEPARATORS = " \t\r\n[],;"
_INSTRUCTION = (
    'You can call tools. To call one, answer with a JSON object alone: {"name": NAME, "arguments": {…}}. The tools,'
    " with JSON schemas of their arguments:"
)
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON style with fixed white space. If a grammar leaves white space free, some models write only white space."""


def plain_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite tool calls and tool results as plain text, for models whose chat template does not support tools.

    The text of the first message begins with a description of the tools. A tool call becomes text of the assistant's
    message. A tool result becomes a user message; consecutive tool results become one user message.
    """
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for before, message in zip([None, *messages], messages, strict=False):
        calls = message.get("tool_calls", ())
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if calls:
            call_texts = (_text(call["function"]) for call in calls)
            kept["content"] = "\n".join(filter(None, (message["content"], *call_texts)))
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name", "the tool"))
            kept = {"role": "user", "content": f"Result of {name}: {message['content']}"}
            if before is not None and before["role"] == "tool":
                plain[-1]["content"] += "\n" + kept["content"]
                continue
        plain.append(kept)
    if tools:
        described = "\n".join([_INSTRUCTION, *(_text(tool["function"]) for tool in tools)])
        content = plain[0]["content"]
        text = {"type": "text", "text": f"{described}\n\n"}
        plain[0] = {**plain[0], "content": text["text"] + content if isinstance(content, str) else [text, *content]}
    return plain


def calls_grammar(form: BareForm, tools: Sequence[dict[str, Any]], several: bool) -> str:
    """Write a grammar, in llguidance's Lark syntax, that allows one tool call; if `several`, a list of tool calls."""
    rules = ['start: "[" call (", " call)* "]"' if several else "start: call"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        function = tool["function"]
        head = f"{{{_text(form.name)}: {_text(function['name'])}, {_text(form.arguments)}: "
        schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": JSON_STYLE}
        rules += [f'call_{index}: {_text(head)} arguments_{index} "}}"', f"arguments_{index}: %json {_text(schema)}"]
    return "\n".join(rules)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class BareReader:
    """Parser of tool calls at the beginning of an answer: consecutive JSON objects, or a list of JSON objects.

    An answer that does not begin with a tool call is plain text, as is everything after the tool calls. If the request
    forces tool calls (`forced`), all plain text and an incomplete call are dropped.
    """

    def __init__(self, form: BareForm, names: set[str], forced: bool = False) -> None:
        self._forced = forced
        self._form = form
        self._names = names
        self._buffer = ""
        self._has_called = self._is_text = False

    def add(self, text: str, last: bool = False) -> Read:
        """Add text of the answer. Return the tool calls that are now complete, and text that is surely no tool call."""
        self._buffer += text
        read = Read()
        while not self._is_text and (rest := self._buffer.lstrip(_SEPARATORS)):
            if rest[0] != "{":
                self._is_text = True
                break
            try:
                value, size = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):  # the JSON is not complete yet, or is no JSON: wait for more text
                break
            call = self._call(value)
            if call is None:
                self._is_text = True
                break
            self._buffer, self._has_called = rest[size:], True
            read.calls.append(call)
        if self._is_text or (last and (not self._has_called or self._buffer.strip(_SEPARATORS))):
            read.text, self._buffer = "" if self._forced else self._buffer, ""
        return read

    def _call(self, value: dict[str, Any]) -> dict[str, Any] | None:
        name, arguments = value.get(self._form.name), value.get(self._form.arguments)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return openai_call({"function": {"name": name, "arguments": arguments}})
