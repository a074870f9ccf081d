"""How a model writes tool calls, and reading them out of its answers with transformers' parser."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

_THINKING = ("reasoning_content", "thinking", "reasoning")  # what response templates name it
_NAME, _KEY, _VALUE = "probe_tool", "probe_argument", "probe value"


@dataclass
class Read:
    """The content of a piece of an answer.

    Attributes:
        text, reasoning: additions to either.
        calls: tool calls that are complete, in OpenAI's shape.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class AnswerReader:
    """Reads an answer piece by piece.

    Args:
        tokenizer: tokenizer of transformers.
        template: a response template, see `tokenizer.parse_response`.
        prompt: the text that the answer continues; its template may have begun the answer.
        tools: tools that the model may call.
        most_calls: most calls that are told, as `parallel_tool_calls` says; None for any number.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: dict[str, Any],
        prompt: str,
        tools: list[dict[str, Any]],
        most_calls: int | None = None,
    ) -> None:
        self._calls_left = most_calls
        self._parser: Any = tokenizer.get_response_parser(template, prefix=prompt, tools=tools)
        self._held = ""

    def add(self, text: str) -> Read:
        if self._parser is None:
            return Read(text=text)
        self._held += text
        try:
            return self._take(self._parser.feed(text))
        except Exception:  # it looked like a call and is none, or the client's schema of the tool is no schema
            return self._give_up()

    def end(self) -> Read:
        if self._parser is None:
            return Read()
        try:
            return self._take(self._parser.finalize()[1])
        except Exception:
            return self._give_up()

    def _give_up(self) -> Read:
        self._parser = None
        return Read(text=self._held)

    def _take(self, events: list[dict[str, Any]]) -> Read:
        read = Read()
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk" and name == "content":
                read.text += event["text"]
            elif kind == "region_chunk" and name in _THINKING:
                read.reasoning += event["text"]
            elif kind == "region_close" and name == "tool_calls":
                value = event["value"]
                calls = (value if isinstance(value, list) else [value])[: self._calls_left]
                read.calls += map(openai_call, calls)
                if self._calls_left is not None:
                    self._calls_left -= len(calls)
                self._held = ""
            if kind == "region_chunk" and name != "tool_calls":
                self._held = self._held.partition(event["text"])[2]
        return read


def openai_call(value: dict[str, Any]) -> dict[str, Any]:
    """Return a call in OpenAI's shape, with an id of its own."""
    function = value["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    called = {"name": str(function["name"]), "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": called}


@dataclass(frozen=True)
class BareForm:
    """Keys of a call that is a JSON object with nothing around it.

    Attributes:
        name: key of the tool's name.
        arguments: key of its arguments.
    """

    name: str = "name"
    arguments: str = "arguments"


def response_template(tokenizer: Any, chat_template: str | None) -> dict[str, Any] | BareForm | None:
    """Return how answers of a model are read.

    The tokenizer's own `response_template` goes first. Else it is the form in which the chat template writes a call of
    the assistant's: JSON behind a mark, which becomes a response template, or JSON alone. None if neither tells.

    Args:
        tokenizer: tokenizer of transformers.
        chat_template: chat template in the place of the tokenizer's own.
    """
    told: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if told is not None:
        return told
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    schema = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": schema}}]
    calls = [{"type": "function", "id": "probe0000", "function": function}]
    question = [{"role": "user", "content": "?"}]
    answered = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        before, after = (
            tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=chat_template, tokenize=False, add_generation_prompt=prompts
            )
            for messages, prompts in ((question, True), (answered, False))
        )
    except Exception:  # whatever a template raises of what it does not know
        return None
    if not after.startswith(before):
        return None
    return _template_of(after[len(before) :], tokenizer.eos_token or "\0")


def _template_of(written: str, end: str) -> dict[str, Any] | BareForm | None:
    """Return the response template of a call as it was written."""
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
        calls = {
            "open": opening,
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": function},
            "transform_each": one is not call,
        }
        if closing:
            calls["close"] = closing
        return {"start_anchor": opening, "fields": {"tool_calls": calls, "content": {"content": "text"}}}
    return None
