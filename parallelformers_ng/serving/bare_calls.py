"""Tool calls that are JSON with nothing around them: how they are written, forced, and read out of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from parallelformers_ng.serving.tools import BareForm, Read, openai_call

_SEPARATORS = " \t\r\n[],;"


JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models have seen most JSON; if white space is free, some write nothing else."""


def calls_grammar(form: BareForm, tools: Sequence[dict[str, Any]], several: bool) -> str:
    """Return the grammar, in llguidance's Lark, of an answer that is calls and nothing else.

    Args:
        form: keys of the calls.
        tools: tools that may be called, in OpenAI's shape.
        several: whether the answer is a list of one call or more; else it is one call.
    """
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
    """Reads calls from the beginning of an answer: JSON objects one after another, or a list of them.

    An answer that begins otherwise is text.

    Args:
        form: keys of the calls.
        names: names of the tools; an object that names none of them is text.
        most_calls: most calls that are told; None for any number.
    """

    def __init__(self, form: BareForm, names: set[str], most_calls: int | None = None) -> None:
        self._form = form
        self._names = names
        self._calls_left = most_calls
        self._held = ""
        self._has_called = self._is_text = False

    def add(self, text: str) -> Read:
        self._held += text
        read = Read()
        while not self._is_text and (rest := self._held.lstrip(_SEPARATORS)):
            if rest[0] != "{":
                self._is_text = True
                break
            try:
                value, size = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):  # it is not complete, or no JSON
                break
            call = self._call(value)
            if call is None:
                self._is_text = True
                break
            self._held, self._has_called = rest[size:], True
            if self._calls_left is None or self._calls_left > 0:
                read.calls.append(call)
                self._calls_left = None if self._calls_left is None else self._calls_left - 1
        if self._is_text:
            read.text, self._held = self._held, ""
        return read

    def end(self) -> Read:
        text, self._held = self._held, ""
        return Read() if self._has_called and not text.strip(_SEPARATORS) else Read(text=text)

    def _call(self, value: dict[str, Any]) -> dict[str, Any] | None:
        name, arguments = value.get(self._form.name), value.get(self._form.arguments)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return openai_call({"function": {"name": name, "arguments": arguments}})
