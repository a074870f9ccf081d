"""Reads from a request which tools the model may call, and whether the model must call a tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.structured import Fields


class ToolFunction(Fields):
    """Function that a model may call. Further fields, such as `description`, are kept for the chat template.

    Attributes:
        parameters: JSON schema of the arguments; None for any JSON object.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """Tool that a model may call, in OpenAI's format, or that `tool_choice` names.

    Further fields are kept for the chat template.
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: ToolFunction


class _Allowed(Fields):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[Tool], Field(min_length=1)]


class _AllowedTools(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class _Choice(Fields):
    tool_choice: Annotated[Tool | _AllowedTools, Field(discriminator="type")]


@dataclass(frozen=True)
class ToolChoice:
    """Tool choice of a request.

    Attributes:
        tools: tools that the model may call, in OpenAI's format; empty if the model must not call tools.
        forced: whether the answer must be a tool call.
        most_calls: maximum number of calls in the answer; None for no limit.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: bool = False
    most_calls: int | None = None


def read_tool_choice(sent: list[Tool] | None, choice: str | dict[str, Any] | None, several: bool) -> ToolChoice:
    """Return the tool choice of a request.

    Args:
        sent: field `tools` of the request.
        choice: field `tool_choice` of the request.
        several: field `parallel_tool_calls` of the request.

    Raises:
        ApiError: `tool_choice` is an unknown word, names an unknown tool, or requires a call without tools, status 400.
        ValidationError: `tool_choice` is an object of an unknown form.
    """
    tools = [tool.model_dump() for tool in sent or ()]
    most_calls = None if several else 1
    if isinstance(choice, dict):
        named = _Choice.model_validate({"tool_choice": choice}).tool_choice
        if isinstance(named, Tool):
            return ToolChoice(_among(tools, [named.function.name]), forced=True, most_calls=1)
        allowed = [each.function.name for each in named.allowed_tools.tools]
        return ToolChoice(_among(tools, allowed), named.allowed_tools.mode == "required", most_calls)
    if choice not in (None, "auto", "none", "required"):
        raise bad_request(
            f"tool_choice is {choice!r}; set 'auto', 'none', 'required', or an object that names a function",
            "tool_choice",
        )
    if choice == "required" and not tools:
        raise bad_request("tool_choice is 'required', but the request has no tools", "tool_choice")
    return ToolChoice() if choice == "none" else ToolChoice(tools, choice == "required", most_calls)


def _among(tools: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    known = {tool["function"]["name"] for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise bad_request(f"tool_choice names {missing[0]!r}, which is not in the tools of the request", "tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in names]
