"""Converts tokens to text piece by piece, in complete characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # replacement character, which a tokenizer writes for an incomplete character


class Detokenizer:
    """Incremental converter of tokens to text.

    The text of a token depends on the tokens before it, because of spaces and characters of several tokens. Each call
    decodes the last complete piece with and without the new tokens. The difference is the new text.

    Args:
        tokenizer: tokenizer of transformers.
        keep_special: whether the text contains special tokens.
    """

    def __init__(self, tokenizer: Any, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = not keep_special
        self._tokens: list[int] = []
        self._context, self._read = 0, 0

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Add tokens and return the new text in complete characters.

        Args:
            tokens: ids of the new tokens.
            last: whether no tokens follow; then incomplete characters are returned too.
        """
        self._tokens += tokens
        before = self._decode(self._tokens[self._context : self._read])
        now = self._decode(self._tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not last):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)


class Stopper:
    """Filter that ends a text before the first stop string.

    The filter delays the end of the text if the end may be the beginning of a stop string.

    Args:
        stops: stop strings, possibly none; each stop string has at least one character.

    Attributes:
        stopped: whether the text has reached a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._delayed = ""
        self.stopped = False

    def add(self, text: str, last: bool = False) -> str:
        """Add text and return the text that cannot belong to a stop string.

        Args:
            text: new text.
            last: whether no text follows; then delayed text is returned too.
        """
        if self.stopped:
            return ""
        text = self._delayed + text
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped, self._delayed = True, ""
            return text[: min(ends)]
        delay = 0 if last else max((_beginning(text, stop) for stop in self._stops), default=0)
        self._delayed = text[len(text) - delay :]
        return text[: len(text) - delay]


def _beginning(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
