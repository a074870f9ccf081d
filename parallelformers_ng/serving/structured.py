"""Reads constraints on answers, and the choice of tools, from OpenAI's and vLLM's request fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.logs import note_unknown

Choices = Annotated[list[str], Field(min_length=1)]


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(as_list, json_schema_input_type=str | list[str])]
"""One text or several texts."""


@dataclass(frozen=True)
class Constraint:
    """A constraint on the text of an answer.

    Attributes:
        kind: "json" for a JSON schema, "regex", "choice", "grammar" for Lark or GBNF, or "lark".
        value: JSON schema, pattern, list of choices, or grammar.
        param: request field with the constraint, for error messages.
        whitespace: pattern of the white space in JSON; "" for no white space, None for one space after commas and
            colons.
    """

    kind: str
    value: Any
    param: str = "response_format"
    whitespace: str | None = None


class Fields(BaseModel):
    """Base class of request fields. A field with the value `null` counts as missing."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_null(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class JsonSchema(Fields):
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Fields):
    """Field `response_format` of OpenAI; the type "json_schema" needs the field `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint("json", {"type": "object"})
        if self.json_schema is None:
            raise bad_request("response_format has the type json_schema, but no field json_schema", "response_format")
        return Constraint("json", self.json_schema.schema_)


class StructuredOutputs(Fields):
    """vLLM's field `structured_outputs`: exactly one of the first five fields is set; the others are options."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: Any = None
    disable_fallback: bool = False  # in vLLM it chooses a library; here it has no effect

    def constraint(self, param: str = "structured_outputs") -> Constraint:
        if self.structural_tag is not None:
            raise bad_request("structural_tag is not supported: use a grammar", param, "unsupported_parameter")
        schema = {"type": "object"} if self.json_object else _schema(self.json_, param)
        choices = {"json": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        kinds = [kind for kind, value in choices.items() if value is not None]
        if len(kinds) != 1 or (self.json_object and self.json_ is not None):
            message = f"{param} needs exactly one of json, regex, choice, grammar and json_object, but has {len(kinds)}"
            raise bad_request(message, param)
        if self.disable_additional_properties and schema is not None:
            schema = _closed(schema)
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        return Constraint(kinds[0], choices[kinds[0]] if schema is None else schema, param, whitespace)


class GuidedFields(Fields):
    """Request fields with constraints on the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None

    def constraint(self, forced: Constraint | None = None) -> Constraint | None:
        """Return the only constraint on the answer (several raise an error); `forced` replaces `response_format`."""
        guides = [forced]
        if self.response_format is not None and forced is None:
            guides.append(self.response_format.constraint())
        if self.structured_outputs is not None:
            guides.append(self.structured_outputs.constraint())
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "grammar"):
            if (value := getattr(self, name)) is not None and value != "":  # for llama.cpp's clients, "" is no grammar
                kind = name.removeprefix("guided_").removesuffix("_schema")
                older: dict[str, Any] = {kind: value, "whitespace_pattern": self.guided_whitespace_pattern}
                guides.append(StructuredOutputs(**older).constraint(name))
        constraints = [each for each in guides if each is not None]
        if len(constraints) > 1:
            names = " and ".join(each.param for each in constraints)
            raise bad_request(f"an answer can have one constraint, but the request has {names}", constraints[1].param)
        return constraints[0] if constraints else None


def _schema(value: str | dict[str, Any] | None, param: str) -> dict[str, Any] | None:
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise bad_request(f"{param}: the JSON schema is not a JSON object", param)
    return schema


def _closed(schema: Any) -> Any:
    """Return a copy of a JSON schema whose objects allow no other properties than those that the schema names."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_object = "object" in (schema.get("type"), *(schema["type"] if isinstance(schema.get("type"), list) else ()))
    return {"additionalProperties": False, **closed} if is_object or "properties" in schema else closed


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


def _without_custom(tools: Any) -> Any:
    """Drop tools of type "custom" if there are also functions; templates have no format for their free-text input."""
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not {"custom", "function"} <= set(kinds):
        return tools
    note_unknown("tools", "type: custom", ())
    return [tool for tool in tools if not (isinstance(tool, dict) and tool.get("type") == "custom")]


without_custom = BeforeValidator(_without_custom)


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
        max_calls: maximum number of calls in the answer; None for no limit.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: bool = False
    max_calls: int | None = None


def read_tool_choice(sent: list[Tool] | None, choice: str | dict[str, Any] | None, several: bool) -> ToolChoice:
    tools = [tool.model_dump() for tool in sent or ()]
    max_calls = None if several else 1
    if isinstance(choice, dict):
        named = _Choice.model_validate({"tool_choice": choice}).tool_choice
        if isinstance(named, Tool):
            return ToolChoice(_among(tools, [named.function.name]), forced=True, max_calls=1)
        allowed = [each.function.name for each in named.allowed_tools.tools]
        return ToolChoice(_among(tools, allowed), named.allowed_tools.mode == "required", max_calls)
    if choice not in (None, "auto", "none", "required"):
        message = f"tool_choice is {choice!r}; set 'auto', 'none', 'required', or an object that names a function"
        raise bad_request(message, "tool_choice")
    if choice == "required" and not tools:
        raise bad_request("tool_choice is 'required', but the request has no tools", "tool_choice")
    return ToolChoice() if choice == "none" else ToolChoice(tools, choice == "required", max_calls)


def _among(tools: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    known = {tool["function"]["name"] for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise bad_request(f"tool_choice names {missing[0]!r}, which is not in the tools of the request", "tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in names]
