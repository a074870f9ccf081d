"""Messages to a prompt, through the tokenizer's chat template, and prompts to tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from parallelformers_ng.serving.bare_calls import BareReader, calls_grammar
from parallelformers_ng.serving.errors import bad_request
from parallelformers_ng.serving.requests import Message
from parallelformers_ng.serving.structured import Constraint
from parallelformers_ng.serving.tool_choice import ToolChoice
from parallelformers_ng.serving.tool_prompts import plain_messages
from parallelformers_ng.serving.tools import AnswerReader, BareForm, response_template


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
    def _form(self) -> dict[str, Any] | BareForm | None:
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
            read = [_plain(message) for message in messages]
            if self._form is None:
                read, tools = plain_messages(read, tools), []
            text: str = self.tokenizer.apply_chat_template(
                read,
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

    @property
    def _bare_form(self) -> BareForm:
        return self._form if isinstance(self._form, BareForm) else BareForm()

    def forced_calls(self, choice: ToolChoice) -> Constraint:
        """Return the constraint on an answer that calls a tool: JSON, with nothing before and after."""
        several = choice.most_calls is None
        return Constraint("lark", calls_grammar(self._bare_form, choice.tools, several), "tools")

    def reader(self, prompt: str, choice: ToolChoice) -> AnswerReader | BareReader | None:
        """Return what takes reasoning and tool calls out of an answer, None if all of it is text.

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
