"""Answers that meet a JSON schema: from a schema to a grammar, which is checked here and kept to by the ranks."""

from __future__ import annotations

import asyncio
import functools
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parallelformers_ng.runtime.freed_memory import trim_heap
from parallelformers_ng.serving.errors import ApiError, bad_request
from parallelformers_ng.serving.grammar import (
    LARGE_CHARACTERS,
    MOST_CHARACTERS,
    Grammar,
    grammar_tokenizer,
    matcher_of,
)

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
        self._thread = ThreadPoolExecutor(1, "schemas")

    @functools.cached_property
    def _packed(self) -> bytes:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._ends:
            raise bad_request(
                "response_format needs a fast tokenizer, and a token that ends answers", "response_format"
            )
        text = json.loads(backend.to_str())
        return zlib.compress(json.dumps({**text, "padding": None, "truncation": None}).encode(), 1)

    async def read(self, schema: dict[str, Any]) -> str:
        """`grammar`, beside the loop: one schema at a time, so that many large ones take no more than one core."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.grammar, schema)

    def processor(self, grammar: str, prompt: int) -> Grammar:
        """What keeps an answer to a grammar.

        Args:
            grammar: of `grammar`.
            prompt: how many tokens there are before the answer.
        """
        return Grammar(grammar, self._packed, self._words, self._ends, prompt)

    def grammar(self, schema: dict[str, Any]) -> str:
        """The grammar of the answers that meet a JSON schema.

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
        if len(grammar) > MOST_CHARACTERS:
            raise bad_request(
                f"response_format: the schema has {len(grammar)} characters, and may have {MOST_CHARACTERS}",
                "response_format",
            )
        why = self._why_not(grammar)
        if len(grammar) > LARGE_CHARACTERS:
            trim_heap()
        if why:
            raise bad_request(f"response_format: {why}", "response_format")
        return grammar

    def _why_not(self, grammar: str) -> str:
        """What is wrong with a grammar, "" where nothing is."""
        matcher = matcher_of(grammar, grammar_tokenizer(self._packed, self._words, self._ends))
        if not matcher.is_error():
            matcher.compute_bitmask()  # what takes too much at the first token shall not come to the ranks
        return matcher.get_error() if matcher.is_error() else ""
