"""Answers that meet a JSON schema: from a schema to a grammar, which is checked here and kept to by the ranks."""

from __future__ import annotations

import functools
import json
import zlib
from typing import Any

from parallelformers_ng.serving.errors import ApiError, bad_request
from parallelformers_ng.serving.grammar import Grammar, grammar_tokenizer, matcher_of

_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models have seen most JSON; where white space is free, some write nothing else."""


class Schemas:
    """Makes processors of schemas.

    Args:
        tokenizer: of transformers.
        words: size of the model's vocabulary.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, words: int, ends: set[int]) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self._ends = tuple(sorted(ends))

    @functools.cached_property
    def _packed(self) -> bytes:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._ends:
            raise bad_request(
                "response_format needs a fast tokenizer, and a token that ends answers", "response_format"
            )
        text = json.loads(backend.to_str())
        return zlib.compress(json.dumps({**text, "padding": None, "truncation": None}).encode(), 1)

    def processor(self, schema: dict[str, Any], prompt: int) -> Grammar:
        """What keeps an answer to a schema.

        Args:
            schema: a JSON schema.
            prompt: how many tokens there are before the answer.

        Raises:
            ApiError: it is no schema that can be kept to, or one that takes too much.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ApiError(
                501, "response_format needs llguidance on the server: pip install 'parallelformers-ng[serve]'"
            ) from None
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_STYLE)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"response_format: {error}", "response_format") from None
        matcher = matcher_of(grammar, grammar_tokenizer(self._packed, self._words, self._ends))
        if not matcher.is_error():
            matcher.compute_bitmask()  # what takes too much at the first token shall not come to the ranks
        if matcher.is_error():
            raise bad_request(f"response_format: {matcher.get_error()}", "response_format")
        return Grammar(grammar, self._packed, self._words, self._ends, prompt)
