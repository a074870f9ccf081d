"""Turns chat messages into prompts with the tokenizer's chat template, and prompts into tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from parallelformers_ng.serving.api_errors import bad_request, refusing
from parallelformers_ng.serving.bare_calls import BareReader, calls_grammar, plain_messages
from parallelformers_ng.serving.requests import Message, MessagePart
from parallelformers_ng.serving.structured import Constraint, ToolChoice
from parallelformers_ng.serving.tools import AnswerReader, BareForm, response_template


class Chat:
    """Tokenizer of a server, with its chat template and its format of tool calls.

    Args:
        template: chat template to use; None for that of the processor or of the tokenizer.
        most: maximum number of tokens in a prompt.
        processor: transformers processor of a model that reads pictures, or None.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, most: int = 1 << 31, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self._reads_pictures = processor is not None
        self._template = template or getattr(processor, "chat_template", None)
        self._max_tokens = most
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    @property
    def has_template(self) -> bool:
        return bool(self._template or self.tokenizer.chat_template)

    @functools.cached_property
    def _form(self) -> dict[str, Any] | BareForm | None:
        return response_template(self.tokenizer, self._template)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the chat template ignores content that is a string, so that the content must be a list of parts."""
        mark = "parallelformers"

        def shows(content: Any) -> bool:
            try:
                return mark in self._apply([{"role": "user", "content": content}])
            except Exception:  # a model's chat template may raise any error
                return False

        return not shows(mark) and shows([{"type": "text", "text": mark}])

    def needs_special_tokens(self, text: str) -> bool:
        """Whether to add special tokens to `text`, an output of the chat template: only if the model has a processor,
        and `text` does not begin with BOS. Templates of models without a processor write special tokens themselves."""
        begin = self.tokenizer.bos_token
        return self._reads_pictures and not (begin is not None and text.startswith(begin))

    def ids(self, text: str, special: bool = True) -> list[int]:
        return self.encoding(text, special)["input_ids"]

    def encoding(self, text: str, special: bool = True, second: str | None = None) -> Mapping[str, Any]:
        """Tokenize a text, or a pair of texts. The values, such as `input_ids`, are lists with one item per token."""
        self.check_length(text)
        self.check_length(second or "")
        # JSON can contain a lone surrogate, for which the tokenizer raises an error.
        with refusing((ValueError, TypeError), "the tokenizer cannot read the text", "prompt"):
            return self.tokenizer(text, second, add_special_tokens=special, verbose=False)

    def check_length(self, text: str) -> None:
        """Raise an error if a text has too many characters to fit in the token limit of a prompt.

        The method runs before the tokenizer, which would take seconds for a very long text.
        """
        if len(text) > self._max_tokens * self._longest_token:
            why = f"the prompt has {len(text)} characters, which is more than the limit of {self._max_tokens} tokens"
            raise bad_request(why, "prompt", "context_length_exceeded")

    def prompt(self, messages: list[Message], tools: list[Any], arguments: Mapping[str, Any] | None = None) -> str:
        """Convert chat messages to a prompt with the chat template.

        If the chat template does not support tools, a text in the first message describes the tools instead.
        """
        if not self.has_template:
            why = "the model has no chat template; use /v1/completions, or start the server with --chat-template FILE"
            raise bad_request(why, "messages")
        try:
            read = [_plain(message, self._reads_pictures) for message in messages]
            if self._form is None:
                read, tools = plain_messages(read, tools), []
            if self._takes_parts:
                for message in read:
                    if isinstance(message["content"], str):
                        message["content"] = [{"type": "text", "text": message["content"]}]
            return self._apply(read, tools=tools or None, **(arguments or {"add_generation_prompt": True}))
        except RecursionError:
            raise bad_request("the messages are nested too deeply", "messages") from None
        except Exception as error:  # a model's chat template may raise any error, for example to refuse a role
            if hasattr(error, "param"):
                raise
            raise bad_request(f"the chat template refuses the messages: {error}", "messages") from None

    def _apply(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, chat_template=self._template, tokenize=False, **arguments)

    @property
    def _bare_form(self) -> BareForm:
        return self._form if isinstance(self._form, BareForm) else BareForm()

    def forced_calls(self, choice: ToolChoice) -> Constraint:
        grammar = calls_grammar(self._bare_form, choice.tools, several=choice.max_calls is None)
        return Constraint("lark", grammar, "tools")

    def reader(self, prompt: str, choice: ToolChoice) -> AnswerReader | BareReader | None:
        """Return a new parser for the reasoning and the tool calls of one answer; None if the answer is plain text."""
        if choice.forced or (choice.tools and not isinstance(self._form, dict)):
            return BareReader(self._bare_form, {tool["function"]["name"] for tool in choice.tools}, choice.forced)
        if isinstance(self._form, dict) and (choice.tools or getattr(self.tokenizer, "response_template", None)):
            form = dict(self._form)
            if not choice.tools:  # without tools, text that looks like a tool call stays text
                form["fields"] = {name: field for name, field in form["fields"].items() if name != "tool_calls"}
            return AnswerReader(self.tokenizer, form, prompt, choice.tools)
        return None


def _plain(message: Message, reads_pictures: bool) -> dict[str, Any]:
    """Convert a request's message to the format that chat templates read.

    `content` becomes one string, or a list of parts if the message has pictures. Arguments of tool calls become dicts.
    """
    plain = message.model_dump(exclude_none=True)
    if message.pictures and message.role != "user":
        raise bad_request(f"a message of role {message.role!r} has a picture; the role must be 'user'", "messages")
    if isinstance(message.content, list):
        parts = [_plain_part(part, reads_pictures) for part in message.content]
        plain["content"] = parts if message.pictures else "".join(part["text"] for part in parts)
    plain.setdefault("content", "")
    for call in plain.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with refusing((ValueError,), "the arguments of a tool call are not valid JSON", "messages"):
                call["function"]["arguments"] = json.loads(arguments or "{}")
    return plain


def _plain_part(part: MessagePart, reads_pictures: bool) -> dict[str, Any]:
    if part.type not in (("text", "image_url") if reads_pictures else ("text",)):
        types = "text and pictures (image_url)" if reads_pictures else "text"
        raise bad_request(f"a message has a part of type {part.type!r}; the model reads {types}", "messages")
    if getattr(part, part.type) is None:
        raise bad_request(f"a message has a part of type {part.type!r} without the field {part.type!r}", "messages")
    return {"type": "text", "text": part.text} if part.type == "text" else {"type": "image"}
