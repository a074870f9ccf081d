"""Finds out how a model writes tool calls, and parses answers with transformers' response parser."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

_THINKING = ("reasoning_content", "thinking", "reasoning")  # response templates use one of these names for reasoning
_NAME, _KEY, _VALUE = "probe_tool", "probe_argument", "probe value"


@dataclass
class Read:
    """New content of an answer, as a parser of the answer returns it.

    Attributes:
        text: new text of the answer.
        reasoning: new text of the reasoning.
        calls: complete tool calls, in OpenAI's format.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class AnswerReader:
    """Incremental parser of text, reasoning and tool calls in an answer.

    The parser reads the prompt, because the chat template may have written the beginning of the answer. If
    transformers' parser raises an error, the rest of the answer is text.
    """

    def __init__(self, tokenizer: Any, template: dict[str, Any], prompt: str, tools: list[dict[str, Any]]) -> None:
        self._parser: Any = tokenizer.get_response_parser(template, prefix=prompt, tools=tools)
        self._unparsed = ""

    def add(self, text: str, last: bool = False) -> Read:
        """Add text of the answer, and return new text, new reasoning and the tool calls that are now complete."""
        if self._parser is None:
            return Read(text=text)
        self._unparsed += text
        read = Read()
        try:
            self._take(self._parser.feed(text), read)
            if last:
                self._take(self._parser.finalize()[1], read)
        except Exception:  # the text only resembles a tool call, or a tool of the client has an invalid JSON schema
            self._parser = None
            read.text += self._unparsed
        return read

    def _take(self, events: list[dict[str, Any]], read: Read) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk" and name == "content":
                read.text += event["text"]
            elif kind == "region_chunk" and name in _THINKING:
                read.reasoning += event["text"]
            elif kind == "region_close" and name == "tool_calls":
                value = event["value"]
                read.calls += map(openai_call, value if isinstance(value, list) else [value])
                self._unparsed = ""
            if kind == "region_chunk" and name != "tool_calls":
                self._unparsed = self._unparsed.partition(event["text"])[2]


def openai_call(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a parsed tool call to OpenAI's format, with a new random id."""
    function = value["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    called = {"name": str(function["name"]), "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": called}


@dataclass(frozen=True)
class BareForm:
    """Format of a tool call that is a plain JSON object, without marker tokens around the JSON.

    Attributes:
        name: JSON key of the tool's name.
        arguments: JSON key of the tool's arguments.
    """

    name: str = "name"
    arguments: str = "arguments"


def response_template(tokenizer: Any, chat_template: str | None) -> dict[str, Any] | BareForm | None:
    """Find out how a model writes tool calls, for the parser of its answers.

    The tokenizer's own `response_template` is used if it exists. Otherwise the function writes a sample tool call with
    the chat template, and reads the format from the result: a response template for calls after a marker, `BareForm`
    for calls in plain JSON, or None for an unknown format.
    """
    own_template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own_template is not None:
        return own_template
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    schema = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": schema}}]
    calls = [{"type": "function", "id": "probe0000", "function": function}]
    question = [{"role": "user", "content": "?"}]
    answered = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        options = {"tools": tools, "chat_template": chat_template, "tokenize": False}
        before = tokenizer.apply_chat_template(question, add_generation_prompt=True, **options)
        after = tokenizer.apply_chat_template(answered, **options)
    except Exception:  # a chat template without support for tools may raise any error
        return None
    if not after.startswith(before):
        return None
    return _template_of(after[len(before) :], tokenizer.eos_token or "\0")


def _template_of(written: str, end: str) -> dict[str, Any] | BareForm | None:
    """Derive the format of tool calls from `written`, a message in which the chat template has written a sample call.

    `end` is the end-of-sequence token, at which the message ends.
    """
    written = written.partition(end)[0]
    for start, character in enumerate(written):
        if character not in "[{":
            continue
        try:
            call, size = json.JSONDecoder().raw_decode(written[start:])
        except ValueError:
            continue
        opening, closing = written[:start].strip(), written[start + size :].strip()
        one = call[0] if isinstance(call, list) and call else call
        if not isinstance(one, dict) or _NAME not in one.values():
            return None
        arguments = next((key for key, value in one.items() if value == {_KEY: _VALUE}), None)
        if arguments is None:
            return None
        name = next(key for key, value in one.items() if value == _NAME)
        if not opening:
            return BareForm(name, arguments)
        within = "" if one is not call else "content."
        function = {"name": f"{{{within}{name}}}", "arguments": f"{{{within}{arguments}}}"}
        calls: dict[str, Any] = {"open": opening, "content": "json", "repeats": True, "transform_each": one is not call}
        calls["transform"] = {"type": "function", "function": function}
        if closing:
            calls["close"] = closing
        return {"start_anchor": opening, "fields": {"tool_calls": calls, "content": {"content": "text"}}}
    return None
