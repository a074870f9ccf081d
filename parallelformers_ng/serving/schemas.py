"""Converts constraints on answers to grammars, and checks the grammars before the ranks enforce them."""

from __future__ import annotations

import asyncio
import functools
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parallelformers_ng.runtime.freed_memory import trim_heap
from parallelformers_ng.serving.api_errors import ApiError, bad_request
from parallelformers_ng.serving.bare_calls import JSON_STYLE
from parallelformers_ng.serving.processors import LARGE_CHARACTERS, MAX_CHARACTERS, Grammar, matcher_of
from parallelformers_ng.serving.structured import Constraint


class Schemas:
    """Converter of constraints on answers to logits processors. The model needs a fast tokenizer and an end token."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: set[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = tuple(sorted(ends))
        self._thread = ThreadPoolExecutor(1, "schemas")

    @functools.cached_property
    def _packed(self) -> bytes:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._ends:
            raise bad_request("constraints need a fast tokenizer and an end token; the model lacks one of the two")
        text = json.loads(backend.to_str())
        return zlib.compress(json.dumps({**text, "padding": None, "truncation": None}).encode(), 1)

    async def read(self, constraint: Constraint) -> str:
        """Call `grammar` in a thread that all requests share, so that large constraints use at most one core."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.grammar, constraint)

    def processor(self, grammar: str, prompt: int) -> Grammar:
        """Return a new logits processor for one answer; `prompt` is the number of tokens before the answer."""
        return Grammar(grammar, self._packed, self._vocab_size, self._ends, prompt)

    def grammar(self, constraint: Constraint) -> str:
        """Convert a constraint to a grammar in llguidance's format; raise an ApiError if the grammar is invalid."""
        param = constraint.param
        try:
            grammar = _grammar(constraint)
        except ImportError:
            raise ApiError(501, f"{param} needs the package llguidance on the server: pip install llguidance") from None
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{param}: {error}", param) from None
        if len(grammar) > MAX_CHARACTERS:
            raise bad_request(f"{param} has {len(grammar)} characters as grammar; the limit is {MAX_CHARACTERS}", param)
        matcher = matcher_of(grammar, self._packed, self._vocab_size, self._ends)
        if not matcher.is_error():
            matcher.compute_bitmask()  # sets the error state if the grammar is too complex at the first token
        why = matcher.get_error() if matcher.is_error() else ""
        del matcher
        if len(grammar) > LARGE_CHARACTERS:
            trim_heap()
        if why:
            raise bad_request(f"{param}: {why}", param)
        return grammar


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher, grammar_from

    if constraint.kind == "json":
        style: Any = JSON_STYLE
        if constraint.whitespace == "":
            style = {**JSON_STYLE, "item_separator": ",", "key_separator": ":"}
        elif constraint.whitespace is not None:
            style = {"whitespace_pattern": constraint.whitespace}
        return LLMatcher.grammar_from_json_schema(constraint.value, defaults=style)
    value: str = json.dumps(constraint.value) if constraint.kind == "choice" else constraint.value
    if len(value) > MAX_CHARACTERS:  # the caller refuses this length, so skip the slow conversion
        return value
    kind: Any = constraint.kind
    return grammar_from(kind, value)
