"""Messages to a prompt, through the tokenizer's chat template, and prompts to tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.bare_calls import BareReader, calls_grammar
from parallelformers_ng.serving.requests import Message, MessagePart
from parallelformers_ng.serving.structured import Constraint
from parallelformers_ng.serving.tool_choice import ToolChoice
from parallelformers_ng.serving.tool_prompts import plain_messages
from parallelformers_ng.serving.tools import AnswerReader, BareForm, response_template


class Chat:
    """The tokenizer's work for a server.

    Args:
        tokenizer: tokenizer of transformers.
        template: a chat template in the place of its own.
        most: tokens that a prompt may have.
        processor: the model's, if it reads pictures; its chat template counts.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, most: int = 1 << 31, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self._reads_pictures = processor is not None
        self._template = template or getattr(processor, "chat_template", None)
        self._most = most
        self._longest = max(map(len, tokenizer.get_vocab()))

    @property
    def has_template(self) -> bool:
        """Whether the model can be talked to."""
        return bool(self._template or self.tokenizer.chat_template)

    @functools.cached_property
    def _form(self) -> dict[str, Any] | BareForm | None:
        return response_template(self.tokenizer, self._template)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads text as parts of a message alone, and would leave out a string."""
        mark = "parallelformers"

        def shows(content: Any) -> bool:
            try:
                return mark in self._apply([{"role": "user", "content": content}])
            except Exception:  # the template is code of the model's
                return False

        return not shows(mark) and shows([{"type": "text", "text": mark}])

    def begins_with_special(self, text: str) -> bool:
        """Return whether special tokens come before the text of a chat, as a processor puts them there.

        Tokenizers leave them to the template; processors add them unless the text begins with one.
        """
        begin = self.tokenizer.bos_token
        return self._reads_pictures and not (begin is not None and text.startswith(begin))

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: the text.
            special: whether the tokens come first that the model's prompts begin with.
        """
        token_ids: list[int] = self.encoding(text, special)["input_ids"]
        return token_ids

    def encoding(self, text: str, special: bool = True) -> Mapping[str, Any]:
        """Return the tokens of a text, and what else the tokenizer has the model read; see `ids`."""
        self.check_length(text)
        try:
            encoding: Mapping[str, Any] = self.tokenizer(text, add_special_tokens=special, verbose=False)
        except (ValueError, TypeError) as error:  # half a character, as JSON can write it
            raise bad_request(f"the text cannot be made tokens: {error}", "prompt") from None
        return encoding

    def check_length(self, text: str) -> None:
        """Raise an error if a text has more tokens than a prompt may have, without the seconds to count them."""
        if len(text) > self._most * self._longest:
            raise bad_request(
                f"the prompt has {len(text)} characters, which are more than {self._most} tokens",
                "prompt",
                "context_length_exceeded",
            )

    def prompt(
        self, messages: list[Message], tools: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Return the text that has the model answer.

        Args:
            messages: the chat.
            tools: tools that the model may call.
            arguments: arguments of the template; by default an answer begins after the messages.
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
                read = [_in_parts(message) for message in read]
            return self._apply(read, tools=tools or None, **(arguments or {"add_generation_prompt": True}))
        except RecursionError:
            raise bad_request("the messages are nested too deeply", "messages") from None
        except Exception as error:  # the template is code of the model's, and judges the messages
            if hasattr(error, "param"):
                raise
            raise bad_request(f"the chat template refuses the messages: {error}", "messages") from None

    def _apply(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, **arguments
        )
        return text

    @property
    def _bare_form(self) -> BareForm:
        return self._form if isinstance(self._form, BareForm) else BareForm()

    def forced_calls(self, choice: ToolChoice) -> Constraint:
        """Return the constraint on an answer that calls a tool: JSON, with nothing before and after."""
        several = choice.most_calls is None
        return Constraint("lark", calls_grammar(self._bare_form, choice.tools, several), "tools")

    def reader(self, prompt: str, choice: ToolChoice) -> AnswerReader | BareReader | None:
        """Return the reader of reasoning and tool calls in an answer, None if all of it is text.

        Args:
            prompt: text that the answer continues.
            choice: tools that the model may call.
        """
        if choice.forced or (choice.tools and not isinstance(self._form, dict)):
            names = {tool["function"]["name"] for tool in choice.tools}
            return BareReader(self._bare_form, names, choice.most_calls)
        if isinstance(self._form, dict) and (choice.tools or getattr(self.tokenizer, "response_template", None)):
            return AnswerReader(self.tokenizer, self._form, prompt, choice.tools, choice.most_calls)
        return None


def _plain(message: Message, reads_pictures: bool) -> dict[str, Any]:
    """Return a message as templates read it: one string, or parts if it has pictures; arguments of calls as objects."""
    plain = message.model_dump(exclude_none=True)
    if message.pictures and message.role != "user":
        raise bad_request(f"a message of role {message.role!r} has a picture; messages of the user may", "messages")
    if isinstance(message.content, list):
        parts = [_plain_part(part, reads_pictures) for part in message.content]
        plain["content"] = parts if message.pictures else "".join(part["text"] for part in parts)
    elif message.content is None:
        plain["content"] = ""
    for call in plain.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments)
            except ValueError:
                raise bad_request("the arguments of a tool call are no JSON", "messages") from None
    return plain


def _plain_part(part: MessagePart, reads_pictures: bool) -> dict[str, Any]:
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "image_url" and part.image_url is not None and reads_pictures:
        return {"type": "image"}
    what = "text and pictures (image_url)" if reads_pictures else "text"
    raise bad_request(f"a message has a part of type {part.type!r}; the model reads {what}", "messages")


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
