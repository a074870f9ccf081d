"""Tokens to text, piece by piece: whole characters alone, and nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer writes for a character of which tokens are missing


class Detokenizer:
    """The text of a sequence that grows.

    A token's text depends on those before it (spaces, characters of several tokens): what is decoded each time is the
    last pieces that were complete, with the new tokens after them, and the difference is new.

    Args:
        tokenizer: any of transformers.
        keep_special: whether special tokens are part of the text.
    """

    def __init__(self, tokenizer: Any, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = not keep_special
        self._tokens: list[int] = []
        self._context, self._read = 0, 0

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Return the text that is complete with these tokens.

        Args:
            last: none follow, so that also what is unfinished is text.
        """
        self._tokens += tokens
        before = self._decode(self._tokens[self._context : self._read])
        now = self._decode(self._tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not last):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


class Stopper:
    """Holds text back while it may be the beginning of a stop string, and ends with the first of them.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, text: str, last: bool = False) -> str:
        """Return the text that may be shown now.

        Args:
            last: none follows.
        """
        if self.stopped:
            return ""
        text = self._held + text
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        hold = 0 if last else max((_beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _beginning(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
