"""What clients send: the fields of OpenAI's API that act here, those that are refused in words, and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from parallelformers_ng.serving.errors import bad_request

Count = Annotated[int, Field(ge=1, le=1 << 31)]
Probability = Annotated[float, Field(gt=0, le=1)]
_MESSAGES = 4096  # a template takes its time for each
TokenId = Annotated[StrictInt, Field(ge=0, le=1 << 31)]

_REFUSED: dict[str, tuple[Any, str]] = {
    "presence_penalty": (0, "use repetition_penalty"),
    "frequency_penalty": (0, "use repetition_penalty"),
    "logit_bias": ({}, "there is nothing in its place"),
    "best_of": (1, "ask for n answers, and choose"),
    "suffix": ("", "there is nothing in its place"),
    "functions": ([], "use tools"),
    "function_call": ("none", "use tool_choice"),
    "modalities": (["text"], "the model answers with text"),
    "dimensions": (None, "cut the embedding yourself"),
}
"""Fields that would change an answer: the value that changes nothing, which is taken, and what to do instead."""


class Request(BaseModel):
    """Unknown fields are ignored, as clients send many that matter to others alone."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    model: str | None = None

    @model_validator(mode="after")
    def _refuse(self) -> Request:
        extra = self.__pydantic_extra__ or {}
        for name in sorted(_REFUSED.keys() & extra.keys()):
            harmless, instead = _REFUSED[name]
            if extra[name] is not None and extra[name] != harmless:
                raise bad_request(f"{name} does not act here: {instead}", name, "unsupported_parameter")
        return self


class StreamOptions(BaseModel):
    include_usage: bool = False


class JsonSchema(BaseModel):
    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_to_meet(self) -> dict[str, Any] | None:
        """The schema that an answer must meet, None where it may be any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class GenerationRequest(Request):
    """What chats and completions have in common."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are told beside each, None where no probabilities are."""
        raise NotImplementedError

    @property
    def tells_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[Any] = self.prompt
        return [several] if several and isinstance(several[0], int) else several


class Part(BaseModel):
    type: str
    text: str | None = None


class Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingRequest(Request):
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def texts(self) -> list[str]:
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not all(isinstance(text, str) for text in texts):
            raise bad_request(
                "the input holds token ids, which are of another tokenizer unless you are sure; send texts (LangChain:"
                " OpenAIEmbeddings(check_embedding_ctx_length=False))",
                "input",
            )
        return list(texts)  # type: ignore[arg-type]


class TokenizeRequest(Request):
    """A prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=_MESSAGES)] | None = None
    add_special_tokens: bool = True
