"""Defines the requests of `/v1/responses`, and converts them to chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.fields import RESPONSES
from parallelformers_ng.serving.requests import MAX_MESSAGES, ChatRequest, Count, Sampling
from parallelformers_ng.serving.structured import Fields, StructuredOutputs, without_custom

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class ResponseTool(Fields):
    """Tool of a request. The validation accepts every type of OpenAI's tools; `of_chat` refuses all but "function"."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        if self.type != "function":
            message = f"tools: the server does not support tools of type {self.type!r}; send tools of type 'function'"
            raise bad_request(message, "tools")
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextFormat(Fields):
    """Format of an answer's text.

    Attributes:
        name: name of the JSON schema; only repeated in the response.
        schema_: JSON schema of the answer, for the type "json_schema"; the field `schema` in JSON.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class TextConfig(Fields):
    """Field `text` of a request.

    Attributes:
        format: format of the answer; None for any text.
        verbosity: field of OpenAI's API without effect; only repeated in the response.
    """

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Fields):
    effort: str | None = None


class ResponsesRequest(Sampling):
    """Request to `/v1/responses`, in the format of OpenAI's Responses API.

    Attributes:
        input: text of the user, or a list of messages, reasoning, function calls and function outputs.
        instructions: system message before the input.
        include: names of additional outputs; only "message.output_text.logprobs" has an effect.
        metadata: values of the client; only repeated in the response.
        stream_options: field of OpenAI's API without effect: the server never pads events to hide the lengths of
            tokens (`include_obfuscation`), and the last event always has the usage.
    """

    route = RESPONSES

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponseTool], without_custom] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include: list[str] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    metadata: dict[str, Any] = Field(default_factory=dict)
    stream_options: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def chat(self) -> ChatRequest:
        """Convert the request to a request of `/v1/chat/completions`."""
        fields = {name: getattr(self, name) for name in Sampling.model_fields if name in self.model_fields_set}
        tells_logprobs = "message.output_text.logprobs" in self.include
        fields |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool.of_chat() for tool in self.tools],
            "tool_choice": _choice_of_chat(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "logprobs": tells_logprobs,
            "top_logprobs": self.top_logprobs if tells_logprobs else None,
            "structured_outputs": self.structured_outputs,
        }
        if self.text.format is not None:
            schema = {"schema": self.text.format.schema_}
            fields["response_format"] = {"type": self.text.format.type, "json_schema": schema}
        return ChatRequest.model_validate(fields)

    def echo(self) -> dict[str, Any]:
        """Return the request fields that OpenAI's API repeats in the response."""
        as_sent = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "tool_choice")
        text_format = self.text.format or TextFormat(type="text")
        excluded = None if text_format.type == "json_schema" else {"name", "schema_"}
        return {
            **{name: getattr(self, name) for name in (*as_sent, "top_logprobs", "top_p")},
            "tools": [tool.model_dump() for tool in self.tools],
            "text": {
                "format": text_format.model_dump(by_alias=True, exclude=excluded),
                "verbosity": self.text.verbosity or "medium",
            },
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
        }

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not 0 < len(self.input) <= MAX_MESSAGES:
            raise bad_request(f"the input has {len(self.input)} items; send 1 to {MAX_MESSAGES} items", "input")
        for number, item in enumerate(self.input):
            _add(messages, item, f"input.{number}")
        if all("reasoning_content" in message and "content" not in message for message in messages):
            raise bad_request("the input has no message", "input")
        return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Convert an item of `input` to a chat message, and append it to `messages` or merge it into the last message."""
    kind = item.get("type") or "message"
    last = messages[-1] if messages else {}
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        content = item.get("content")
        content = _parts(content, where) if role == "user" else _content(content, where)
        if role == "system" == last.get("role"):
            last["content"] += f"\n\n{content}"
        elif role == "assistant" == last.get("role") and "content" not in last and "tool_calls" not in last:
            last["content"] = content  # the assistant's last message so far is only the reasoning for this content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        thought = _content(item.get("content") or item.get("summary") or [], where)
        messages.append({"role": "assistant", "reasoning_content": thought})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id") or "", "type": "function", "function": function}
        if last.get("role") != "assistant":
            messages.append({"role": "assistant"})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id") or "", "content": content})
    else:
        kinds = "message, reasoning, function_call or function_call_output"
        raise bad_request(f"{where} has type {kind!r}, which the server does not support; send {kinds}", "input")


def _parts(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Convert the content of a user's message to a string, or to a list of chat message parts if it has pictures."""
    if not isinstance(content, list) or not any(isinstance(part, dict) and part.get("image_url") for part in content):
        return _content(content, where)
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"]}}
        if isinstance(part, dict) and part.get("type") == "input_image" and part.get("image_url")
        else {"type": "text", "text": _content([part], where)}
        for part in content
    ]


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} has no content", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            why = f"{where} has a part of type {kind!r}; only text parts, and pictures in user messages, are supported"
            raise bad_request(why, "input")
        texts.append(text)
    return "".join(texts)


def _choice_of_chat(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """Convert `tool_choice` from the format of `/v1/responses` to the format of `/v1/chat/completions`."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools") or ()
        named = [{"type": each.get("type"), "function": {"name": each.get("name")}} for each in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named}}
    return choice
