"""A grammar that says which tokens may come next. It runs on the ranks, which import this file and no server."""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor

from parallelformers_ng.runtime.freed_memory import trim_heap


@functools.lru_cache(maxsize=2)
def grammar_tokenizer(packed: bytes, words: int, ends: tuple[int, ...]) -> Any:
    """Return a tokenizer as grammars read it, made of one of Hugging Face's. It takes a second, once in each process.

    Args:
        packed: its JSON, compressed.
        words: size of the model's vocabulary.
        ends: tokens that end an answer.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(zlib.decompress(packed).decode(), n_vocab=words, eos_token=list(ends))


def matcher_of(grammar: str, tokenizer: Any) -> Any:
    """Return a matcher of an answer by a grammar; in an error state if the grammar is invalid or too expensive.

    Args:
        grammar: grammar of llguidance.
        tokenizer: result of `grammar_tokenizer`.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_grammar_size=MOST_SYMBOLS, initial_lexer_fuel=_WORK)
    return _with_deep_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits))


def _with_deep_stack(make: Callable[[], Any]) -> Any:
    """Return what a function returns, called in a thread with a large stack.

    llguidance reads rules that refer to each other by recursion. A chain of 3,000 rules outgrows the stack of an
    ordinary thread, which ends the process; this one has room for as many as fit into `MOST_CHARACTERS`.
    """
    results: list[Any] = []
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: results.append(make()))
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


_stack_size = threading.Lock()
_STACK_BYTES = 512 << 20  # of addresses; memory is taken as far as the recursion goes


MOST_SYMBOLS = 10_000
"""Most symbols of a grammar, about 1,000 properties of an object. To read it takes 0.1 s, in which all rows wait;
twice as many take four times as long."""
_WORK = 50_000
"""What the words of a grammar may take, in units of llguidance: about 4,000 words of one `enum`."""
MOST_CHARACTERS = 128 << 10
"""Of a grammar that is read at all: to find out that one is too large takes memory and time as well."""
LARGE_CHARACTERS = 8 << 10
"""A grammar of so many leaves frees megabytes, and the allocator would keep most of them."""


class GrammarError(ValueError):
    """A grammar is too expensive, or allows no next token."""


class Grammar(LogitsProcessor):
    """Rules out the tokens that no continuation of an answer allows.

    What it needs crosses to the ranks; how far it has read stays where it reads.

    Args:
        grammar: grammar of llguidance.
        packed, words, ends: same as in `grammar_tokenizer`.
        prompt: how many tokens there are before the answer.
    """

    def __init__(self, grammar: str, packed: bytes, words: int, ends: tuple[int, ...], prompt: int) -> None:
        self.grammar = grammar
        self.packed = packed
        self.words = words
        self.ends = ends
        self.prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = self._caught_up(input_ids[0, self.prompt :].tolist())
        if matcher.is_error():
            raise GrammarError(f"the schema cannot be kept to: {matcher.get_error()}")
        if matcher.is_stopped():
            allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
            allowed[list(self.ends)] = True
        else:
            bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
            allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()[: scores.shape[-1]]
        allowed = allowed.to(scores.device)
        if not bool(scores[:, allowed].isfinite().any()):  # min_tokens forbids the end, and nothing else is left
            scores = torch.zeros_like(scores)
        return scores.masked_fill(~allowed, -torch.inf)

    def _caught_up(self, tokens: list[int]) -> Any:
        if self not in _read:
            if len(self.grammar) > LARGE_CHARACTERS:
                weakref.finalize(self, trim_heap)  # after what follows has let go: the last callback is the first
            _read[self] = matcher_of(self.grammar, grammar_tokenizer(self.packed, self.words, self.ends)), 0
        matcher, read = _read[self]
        if tokens[read:]:
            matcher.consume_tokens(tokens[read:])
            _read[self] = matcher, len(tokens)
        return matcher


_read: weakref.WeakKeyDictionary[Grammar, tuple[Any, int]] = weakref.WeakKeyDictionary()
"""The position in a grammar, and the number of tokens taken in."""
