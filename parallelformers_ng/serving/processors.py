"""Restricts the next token to a grammar, and records probabilities. Ranks import this file, which imports no server."""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor

from parallelformers_ng.runtime.freed_memory import trim_heap


@functools.lru_cache(maxsize=2)
def _grammar_tokenizer(packed: bytes, vocab_size: int, ends: tuple[int, ...]) -> Any:
    """Convert a Hugging Face tokenizer to a tokenizer of llguidance. The conversion takes about a second.

    Args:
        packed: zlib-compressed JSON of the tokenizer, in the format of `tokenizer.json`.
        vocab_size: number of tokens in the model's vocabulary.
        ends: ids of tokens that end an answer.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(zlib.decompress(packed).decode(), n_vocab=vocab_size, eos_token=list(ends))


def matcher_of(grammar: str, packed: bytes, vocab_size: int, ends: tuple[int, ...]) -> Any:
    """Make an llguidance matcher, whose `is_error()` is true if the grammar is invalid or too expensive."""
    from llguidance import LLMatcher, LLParserLimits

    tokenizer = _grammar_tokenizer(packed, vocab_size, ends)
    limits = LLParserLimits(max_grammar_size=MAX_SYMBOLS, initial_lexer_fuel=_WORK)
    return _with_deep_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits))


def _with_deep_stack(make: Callable[[], Any]) -> Any:
    """Call `make` in a thread with a large stack, and return its result.

    llguidance follows references between rules by recursion. With the stack of an ordinary thread, a chain of 3,000
    rules would crash the process. The large stack suffices for every grammar of at most `MAX_CHARACTERS`.
    """
    threads = ThreadPoolExecutor(1)
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            result = threads.submit(make)
        finally:
            threading.stack_size(before)
    threads.shutdown(wait=False)
    return result.result()


_stack_size = threading.Lock()
_STACK_BYTES = 512 << 20  # only reserves address space; the part of the stack that is used takes memory


MAX_SYMBOLS = 10_000
"""Maximum number of symbols in a grammar, enough for an object with about 1,000 properties.

Reading a grammar of this size takes 0.1 s, in which all rows wait. Twice as many symbols take four times as long."""
_WORK = 50_000
"""Limit of the lexer's work, in llguidance's units. An `enum` of about 4,000 words reaches the limit."""
MAX_CHARACTERS = 128 << 10
"""Maximum number of characters in a grammar. Longer grammars are refused unread, because reading takes time."""
LARGE_CHARACTERS = 8 << 10
"""Size of a grammar, in characters, above which the heap is trimmed. A large grammar frees megabytes, and the
allocator would keep most of this memory."""


class GrammarError(ValueError):
    """A grammar is too expensive for llguidance, or allows no next token."""


@dataclass(eq=False)
class Grammar(LogitsProcessor):
    """Logits processor that sets the scores of tokens that a grammar does not allow next to -inf.

    The processor takes one sequence, with ids `[1, tokens]` and scores `[1, vocabulary]`. Only the attributes are sent
    to the ranks; each decoding process keeps its own matcher. The call raises GrammarError if the grammar is too
    expensive or allows no next token.

    Attributes:
        grammar: grammar in llguidance's format.
        packed, vocab_size, ends: same as in `_grammar_tokenizer`.
        prompt: number of tokens before the answer.
    """

    grammar: str
    packed: bytes
    vocab_size: int
    ends: tuple[int, ...]
    prompt: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = self._caught_up(input_ids[0, self.prompt :].tolist())
        if matcher.is_error():
            raise GrammarError(f"llguidance cannot follow the grammar: {matcher.get_error()}")
        if matcher.is_stopped():
            allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
            allowed[list(self.ends)] = True
        else:
            bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
            allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()[: scores.shape[-1]]
        allowed = allowed.to(scores.device)
        # If min_tokens forbids the only token that the grammar allows (the end token), the grammar has priority.
        if not bool(scores[:, allowed].isfinite().any()):
            scores = torch.zeros_like(scores)
        return scores.masked_fill(~allowed, -torch.inf)

    def _caught_up(self, tokens: list[int]) -> Any:
        if self not in _read:
            if len(self.grammar) > LARGE_CHARACTERS:
                # Finalizers run in reverse order, so `trim_heap` runs after `_read` has dropped the matcher.
                weakref.finalize(self, trim_heap)
            _read[self] = matcher_of(self.grammar, self.packed, self.vocab_size, self.ends), 0
        matcher, count = _read[self]
        if tokens[count:]:
            matcher.consume_tokens(tokens[count:])
            _read[self] = matcher, len(tokens)
        return matcher


_read: weakref.WeakKeyDictionary[Grammar, tuple[Any, int]] = weakref.WeakKeyDictionary()
"""Matcher of each grammar, and the number of tokens that the matcher has consumed."""


@dataclass(frozen=True)
class Likelihood:
    """Log-probabilities at one position of a sequence: of its token, and of the most likely tokens.

    Attributes:
        token: id of the token at the position.
        logprob: natural logarithm of the token's probability.
        top: ids and log-probabilities of the most likely tokens at the position, most likely first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Recorder(LogitsProcessor):
    """Logits processor that records the log-probabilities of a sequence and does not change the scores.

    The processor takes one sequence, with ids `[1, tokens]` and scores `[1, vocabulary]`. The ranks return the recorded
    values to the caller with the tokens.

    Attributes:
        alternatives: number of most likely tokens to record at each position.
        top: ids and log-probabilities of the most likely tokens at each position, most likely first.
        chosen: log-probability of the chosen token at each position, except the newest position.
        last: log-probabilities of all tokens at the newest position, float32 `[vocabulary]`; None before the first.
    """

    alternatives: int
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    last: torch.Tensor | None = None  # kept whole, because the token of the newest position is not chosen yet

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.chosen.append(float(self.last[input_ids[0, -1]]))
        self.last = scores[0].float().log_softmax(-1)
        self.top.append(likeliest(self.last, self.alternatives))
        return scores

    def of(self, place: int, token: int) -> Likelihood:
        """Return the log-probabilities at position `place` of the answer, where `token` was chosen."""
        assert self.last is not None
        logprob = self.chosen[place] if place < len(self.chosen) else float(self.last[token])
        return Likelihood(token, logprob, self.top[place])


def likeliest(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Return ids and log-probabilities of the `count` most likely tokens of the vocabulary, most likely first."""
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return list(zip(tokens.tolist(), values.tolist(), strict=True))
