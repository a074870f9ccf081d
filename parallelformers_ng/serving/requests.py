"""Defines the requests of clients, with the supported fields of OpenAI's and vLLM's requests.

`fields.py` lists the unsupported fields.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.fields import CHAT, COMPLETIONS, EMBEDDINGS, IGNORED, REFUSED, TOKENIZE
from parallelformers_ng.serving.logs import note_unknown
from parallelformers_ng.serving.structured import Fields, GuidedFields, Texts, Tool, as_url, without_custom

Count = Annotated[int, Field(ge=1, le=1 << 31)]
Probability = Annotated[float, Field(gt=0, le=1)]
MAX_MESSAGES = 4096  # limits the time that the chat template takes, which grows with the number of messages
TokenId = Annotated[StrictInt, Field(ge=0, le=1 << 31)]
TokenName = Annotated[int, Field(ge=0, le=1 << 31)]  # not strict, because a token id as a JSON key is a string: "17"
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
MAX_BIASES = 1024  # limits the work per decode step, because each step adds every bias
_NO_TEMPLATE_VARIABLES = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of `apply_chat_template` that are not template variables, or that have their own request fields."""


class ApiRequest(Fields):
    """Base class of requests. Unknown fields are logged and ignored, because clients send fields for other servers.

    The validation raises ApiError with status 400 if `fields.REFUSED` lists a field of the request for its route, and
    the field has a value with an effect.

    Attributes:
        route: path of the route, such as "/v1/completions", to look up fields in the tables of `fields.py`.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, hide_input_in_errors=True)
    route: ClassVar[str]

    model: str | None = None

    @model_validator(mode="after")
    def _refuse(self) -> ApiRequest:
        for name, value in sorted((self.__pydantic_extra__ or {}).items()):
            refused, ignored = REFUSED.get(name), IGNORED.get(name)
            if refused and self.route in refused.routes:
                if not refused.takes(value):
                    raise bad_request(f"{name} is not supported: {refused.note}", name, "unsupported_parameter")
            elif not ignored or self.route not in ignored.routes:
                note_unknown(self.route, name, type(self).model_fields)
        return self


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False  # vLLM has this field; only false is supported here


class Sampling(ApiRequest):
    """Fields that control the sampling of an answer."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES)] = Field(default_factory=dict)
    stop: Texts = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] = 0
    stream: bool | None = None

    @property
    def penalizes(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


class GenerationRequest(Sampling, GuidedFields):
    """Common fields of chats and completions."""

    max_tokens: Count | None = None
    n: Count | None = None
    stream_options: StreamOptions | None = None

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens in an answer; None if the request sets no limit."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to return at each position, or None to return no probabilities."""
        raise NotImplementedError

    @property
    def tells_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """Request to `/v1/completions`.

    Attributes:
        prompt: one prompt or several prompts; each prompt is text or a list of token ids.
        logprobs: number of most likely tokens to return at each position; None to return no probabilities.
        max_tokens: maximum number of tokens in an answer; 0 with `echo` returns only the prompt.
    """

    route = COMPLETIONS
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request; each prompt is text or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[Any] = self.prompt
        return [several] if several and isinstance(several[0], int) else several


class ImageUrl(Fields):
    """Address of a picture. The server ignores `detail`, because the model's processor chooses the size."""

    url: str


class MessagePart(Fields):
    """Part of a message. The server reads parts of the types "text" and "image_url", and refuses other types."""

    type: str
    text: str | None = None
    image_url: Annotated[ImageUrl | None, BeforeValidator(as_url, json_schema_input_type=ImageUrl | str)] = None


class Function(Fields):
    """Call of a function in a message.

    Attributes:
        name: name of the function.
        arguments: JSON object, or the text of a JSON object.
    """

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Fields):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


def _refuse_field(value: Any, info: Any) -> Any:
    raise bad_request(f"a message has {info.field_name}, which the server does not support; remove it", "messages")


_Unsupported = Annotated[Any, AfterValidator(_refuse_field)]
_REASONING = Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))  # vLLM has used both names


class Message(Fields):
    """Message of a chat.

    Attributes:
        content: text, or a list of parts; None for a message without content, such as a message with tool calls.
        reasoning_content: reasoning of the assistant before the content; `reasoning` is an alias.
        tool_call_id: id of the call, for a message with the result of a tool.
        name: name of the author or of the tool, for the chat template.
    """

    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    reasoning_content: Annotated[str | None, _REASONING] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: _Unsupported = None
    refusal: _Unsupported = None
    audio: _Unsupported = None

    @property
    def pictures(self) -> list[str]:
        """URLs of the pictures."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if part.type == "image_url" and part.image_url is not None]


class TemplateFields(ApiRequest):
    """Fields that control how chat messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: Annotated[list[Tool], without_custom] | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        if self.continue_final_message and self.add_generation_prompt:
            message = "the request has continue_final_message and add_generation_prompt; remove one of the two fields"
            raise bad_request(message, "continue_final_message")
        if reserved := sorted(_NO_TEMPLATE_VARIABLES & self.chat_template_kwargs.keys()):
            message = f"chat_template_kwargs has {reserved[0]}, which is not a variable of the template; remove it"
            raise bad_request(message, "chat_template_kwargs")
        arguments = {
            **self.chat_template_kwargs,
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt": self.add_generation_prompt is not False and not self.continue_final_message,
            "documents": self.documents,
        }
        if self.reasoning_effort is None:
            return arguments
        thinks = self.reasoning_effort != "none"
        return {"enable_thinking": thinks, **arguments, "reasoning_effort": self.reasoning_effort}


class ChatRequest(TemplateFields, GenerationRequest):
    """Request to `/v1/chat/completions`.

    Attributes:
        max_completion_tokens: newer name of `max_tokens`; overrides `max_tokens`.
        logprobs: whether the answer has the probability of each token.
        parallel_tool_calls: whether an answer may have several tool calls.
        add_special_tokens: whether the tokenizer adds special tokens to the text of the chat template; by default
            `Chat.needs_special_tokens` decides.
    """

    route = CHAT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_special_tokens: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingRequest(ApiRequest):
    """Request to `/v1/embeddings`.

    Attributes:
        input: one text or several texts. Token ids pass the validation, but `texts` refuses them.
        encoding_format: "float" for lists of numbers, "base64" for little-endian float32 values.
    """

    route = EMBEDDINGS

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def texts(self) -> list[str]:
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not all(isinstance(text, str) for text in texts):
            advice = "send texts (with LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False))"
            raise bad_request(f"the input has token ids, which may belong to another tokenizer; {advice}", "input")
        return list(texts)  # type: ignore[arg-type]


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: list[TokenId]


class TokenizeRequest(TemplateFields):
    """Request to `/tokenize`, with either a prompt or chat messages.

    Attributes:
        add_special_tokens: whether the tokenizer adds special tokens. By default true for a prompt; for messages,
            `Chat.needs_special_tokens` decides.
    """

    route = TOKENIZE

    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
