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
        tokenizer: tokenizer of transformers.
        template: chat template that replaces all other chat templates; None for the processor's or the tokenizer's.
        most: maximum number of tokens in a prompt.
        processor: processor of a model that reads pictures, or None; its chat template replaces the tokenizer's.

    Attributes:
        tokenizer: the argument of the same name.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, most: int = 1 << 31, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self._reads_pictures = processor is not None
        self._template = template or getattr(processor, "chat_template", None)
        self._max_tokens = most
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    @property
    def has_template(self) -> bool:
        """Whether a chat template exists: the argument `template`, the processor's or the tokenizer's."""
        return bool(self._template or self.tokenizer.chat_template)

    @functools.cached_property
    def _form(self) -> dict[str, Any] | BareForm | None:
        return response_template(self.tokenizer, self._template)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads only lists of message parts, and drops content that is a string."""
        mark = "parallelformers"

        def shows(content: Any) -> bool:
            try:
                return mark in self._apply([{"role": "user", "content": content}])
            except Exception:  # the template is foreign code and may raise any error
                return False

        return not shows(mark) and shows([{"type": "text", "text": mark}])

    def begins_with_special(self, text: str) -> bool:
        """Return whether the processor must add special tokens before the text of a chat.

        A tokenizer leaves special tokens to the template. A processor adds special tokens unless the text begins with
        the BOS token.
        """
        begin = self.tokenizer.bos_token
        return self._reads_pictures and not (begin is not None and text.startswith(begin))

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: text to tokenize.
            special: whether the tokenizer adds its special tokens, such as BOS.

        Raises:
            ApiError: the text is too long or invalid, status 400.
        """
        return self.encoding(text, special)["input_ids"]

    def encoding(self, text: str, special: bool = True, second: str | None = None) -> Mapping[str, Any]:
        """Return all model inputs that the tokenizer makes from a text, as lists with one item for each token.

        Args:
            text, special: the same as in `ids`.
            second: second text of a pair, or None.

        Raises:
            ApiError: a text is too long or invalid, status 400.
        """
        self.check_length(text)
        self.check_length(second or "")
        # A lone surrogate, which JSON can contain, is an error of the tokenizer.
        with refusing((ValueError, TypeError), "the tokenizer cannot read the text", "prompt"):
            return self.tokenizer(text, second, add_special_tokens=special, verbose=False)

    def check_length(self, text: str) -> None:
        """Raise an error if a text surely has more tokens than the limit of a prompt.

        The check uses the number of characters, because tokenizing a very long text takes seconds.

        Raises:
            ApiError: the text is too long, status 400.
        """
        if len(text) > self._max_tokens * self._longest_token:
            raise bad_request(
                f"the prompt has {len(text)} characters, which is more than the limit of {self._max_tokens} tokens",
                "prompt",
                "context_length_exceeded",
            )

    def prompt(
        self, messages: list[Message], tools: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt for chat messages.

        If the chat template does not show how the model writes tool calls, text in the first message describes the
        tools.

        Args:
            messages: messages of the chat.
            tools: tools that the model may call, in OpenAI's format.
            arguments: arguments of the chat template; by default `add_generation_prompt=True`.

        Raises:
            ApiError: status 400. The model has no chat template, or the template refuses the messages. Or a message has
                content that the model cannot read, or a tool call whose arguments are not JSON.
        """
        if not self.has_template:
            raise bad_request(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template FILE",
                "messages",
            )
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
        except Exception as error:  # the template is foreign code and may refuse messages
            if hasattr(error, "param"):
                raise
            raise bad_request(f"the chat template refuses the messages: {error}", "messages") from None

    def _apply(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, chat_template=self._template, tokenize=False, **arguments)

    @property
    def _bare_form(self) -> BareForm:
        return self._form if isinstance(self._form, BareForm) else BareForm()

    def forced_calls(self, choice: ToolChoice) -> Constraint:
        """Return a constraint that allows only tool calls, as JSON, in an answer.

        Args:
            choice: tool choice of the request, with at least one tool. The constraint allows exactly one call if
                `most_calls` is set, otherwise a list of at least one call.
        """
        grammar = calls_grammar(self._bare_form, choice.tools, several=choice.most_calls is None)
        return Constraint("lark", grammar, "tools")

    def reader(self, prompt: str, choice: ToolChoice) -> AnswerReader | BareReader | None:
        """Return a parser of reasoning and tool calls in an answer, or None if the whole answer is text.

        Each answer needs its own parser.

        Args:
            prompt: prompt before the answer.
            choice: tool choice of the request.

        Raises:
            ValueError: transformers cannot read the tokenizer's response template.
        """
        if choice.forced or (choice.tools and not isinstance(self._form, dict)):
            names = {tool["function"]["name"] for tool in choice.tools}
            return BareReader(self._bare_form, names, choice.forced)
        if isinstance(self._form, dict) and (choice.tools or getattr(self.tokenizer, "response_template", None)):
            form = dict(self._form)
            if not choice.tools:  # what looks like a call is text
                form["fields"] = {name: field for name, field in form["fields"].items() if name != "tool_calls"}
            return AnswerReader(self.tokenizer, form, prompt, choice.tools)
        return None


def _plain(message: Message, reads_pictures: bool) -> dict[str, Any]:
    """Return a message in the format that chat templates read.

    The content is one string, or a list of parts if the message has pictures. The arguments of tool calls are objects.
    """
    plain = message.model_dump(exclude_none=True)
    if message.pictures and message.role != "user":
        raise bad_request(
            f"a message of role {message.role!r} has a picture; only messages of role 'user' may have pictures",
            "messages",
        )
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
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "image_url" and part.image_url is not None and reads_pictures:
        return {"type": "image"}
    if part.type == "text" or (part.type == "image_url" and reads_pictures):
        raise bad_request(f"a message has a part of type {part.type!r} without the field {part.type!r}", "messages")
    types = "text and pictures (image_url)" if reads_pictures else "text"
    raise bad_request(f"a message has a part of type {part.type!r}; the model reads {types}", "messages")
