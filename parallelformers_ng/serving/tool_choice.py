"""Reads from a request which tools the model may call, and whether the model must call a tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.structured import Fields


class _Name(Fields):
    name: str


class _Named(Fields):
    type: Literal["function"]
    function: _Name


class _Allowed(Fields):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[_Named], Field(min_length=1)]


class _AllowedTools(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


_Choice = Annotated[_Named | _AllowedTools, Field(discriminator="type")]
_OBJECTS: TypeAdapter[Any] = TypeAdapter(_Choice)


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


def read_tool_choice(tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, several: bool) -> ToolChoice:
    """Return the tool choice of a request.

    Args:
        tools: field `tools` of the request.
        choice: field `tool_choice` of the request.
        several: field `parallel_tool_calls` of the request.

    Raises:
        ApiError: `tool_choice` is invalid, names an unknown tool, or requires a call without tools, status 400.
    """
    most_calls = None if several else 1
    if isinstance(choice, dict):
        try:
            named = _OBJECTS.validate_python(choice)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("tool_choice", *first["loc"])))
            raise bad_request(f"{where}: {first['msg']}", "tool_choice") from None
        if isinstance(named, _Named):
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
