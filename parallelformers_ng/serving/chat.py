"""Messages to a prompt, through the tokenizer's chat template, and prompts to tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from parallelformers_ng.serving.errors import bad_request
from parallelformers_ng.serving.requests import ChatRequest, Message
from parallelformers_ng.serving.tools import AnswerReader, response_template


class Chat:
    """What a tokenizer does for a server.

    Args:
        tokenizer: of transformers.
        template: a chat template in the place of its own.
        most: tokens that a prompt may have.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, most: int = 1 << 31) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._most = most
        self._longest = max(map(len, tokenizer.get_vocab()))

    @property
    def has_template(self) -> bool:
        """Whether the model can be talked to."""
        return bool(self._template or self.tokenizer.chat_template)

    @functools.cached_property
    def _answers(self) -> dict[str, Any] | None:
        return response_template(self.tokenizer, self._template)

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: the text.
            special: whether the tokens come first that the model's prompts begin with.
        """
        found: list[int] = self.encoding(text, special)["input_ids"]
        return found

    def encoding(self, text: str, special: bool = True) -> Mapping[str, Any]:
        """Return the tokens of a text, and what else the tokenizer has the model read; see `ids`."""
        if len(text) > self._most * self._longest:  # without the seconds that it takes to count them
            raise bad_request(
                f"the prompt has {len(text)} characters, which are more than {self._most} tokens",
                "prompt",
                "context_length_exceeded",
            )
        try:
            encoding: Mapping[str, Any] = self.tokenizer(text, add_special_tokens=special, verbose=False)
        except (ValueError, TypeError) as error:  # half a character, as JSON can write it
            raise bad_request(f"the text cannot be made tokens: {error}", "prompt") from None
        return encoding

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
            text: str = self.tokenizer.apply_chat_template(
                [_plain(message) for message in messages],
                tools=tools or None,
                chat_template=self._template,
                tokenize=False,
                **({"add_generation_prompt": True} if arguments is None else arguments),
            )
        except RecursionError:
            raise bad_request("the messages are nested too deeply", "messages") from None
        except Exception as error:  # the template is code of the model's, and judges the messages
            if hasattr(error, "param"):
                raise
            raise bad_request(f"the chat template refuses the messages: {error}", "messages") from None
        return text

    def tools(self, request: ChatRequest) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        if request.tool_choice not in (None, "auto", "none"):
            raise bad_request("tool_choice may be 'auto' or 'none'; no model here can be made to call", "tool_choice")
        if not request.tools or request.tool_choice == "none":
            return []
        if self._answers is None:
            raise bad_request(
                "the model's tool calls cannot be read: its tokenizer has no response_template, and its chat template"
                " writes no calls as JSON behind a mark; leave tools out",
                "tools",
            )
        return [tool.model_dump() for tool in request.tools]

    def reader(self, prompt: str, tools: list[dict[str, Any]], most_calls: int | None = None) -> AnswerReader | None:
        """Return what takes reasoning and tool calls out of an answer, None if all of it is text.

        Args:
            prompt: text that the answer continues.
            tools: tools that the model may call.
            most_calls: most calls of an answer; None for any number.
        """
        if self._answers is None or not (tools or getattr(self.tokenizer, "response_template", None)):
            return None
        return AnswerReader(self.tokenizer, self._answers, prompt, tools, most_calls)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates read it: text as one string, arguments of calls as objects."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise bad_request(f"a message has a part of type {part.type!r}; the model reads text", "messages")
        plain["content"] = "".join(part.text or "" for part in message.content)
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
