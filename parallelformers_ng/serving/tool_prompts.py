"""Describes tools and tool calls in plain messages, for models whose chat template does not support tools."""

from __future__ import annotations

import json
from typing import Any

_INSTRUCTION = (
    'You can call tools. To call one, answer with a JSON object alone: {"name": NAME, "arguments": {…}}. The tools,'
    " with JSON schemas of their arguments:"
)


def plain_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages with tools to messages without tools.

    The text of the first message begins with a description of the tools. A tool call becomes text of the assistant's
    message. A tool result becomes a user message; consecutive tool results become one user message.

    Args:
        messages: messages of a chat, in the format that chat templates read; at least one message. The function does
            not change the messages.
        tools: tools that the model may call, in OpenAI's format.
    """
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        for call in calls:
            names[call["id"]] = call["function"]["name"]
        if calls:
            call_texts = [_text({key: call["function"][key] for key in ("name", "arguments")}) for call in calls]
            kept["content"] = "\n".join(filter(None, (message["content"], *call_texts)))
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name", "the tool"))
            kept = {"role": "user", "content": f"Result of {name}: {message['content']}"}
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += "\n" + kept["content"]
                continue
            kept["is_result"] = True
        plain.append(kept)
    plain = [{key: value for key, value in message.items() if key != "is_result"} for message in plain]
    if tools:
        described = "\n".join([_INSTRUCTION, *(_text(tool["function"]) for tool in tools)])
        content = plain[0]["content"]
        text = {"type": "text", "text": f"{described}\n\n"}
        plain[0] = {**plain[0], "content": text["text"] + content if isinstance(content, str) else [text, *content]}
    return plain


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
