"""Turns the tokens of an answer into text up to a stop string, and separates reasoning and tool calls from the text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelformers_ng.serving.bare_calls import BareReader
from parallelformers_ng.serving.engine import Engine, GenerationJob
from parallelformers_ng.serving.processors import Likelihood
from parallelformers_ng.serving.tools import AnswerReader, Read

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
        starts = () if last else ((size, stop[:size]) for stop in self._stops for size in range(1, len(stop)))
        delay = max((size for size, start in starts if text.endswith(start)), default=0)
        self._delayed = text[len(text) - delay :]
        return text[: len(text) - delay]


@dataclass
class Piece:
    """A new piece of an answer.

    Attributes:
        index: number of the answer within its request.
        read: text, reasoning and tool calls of the piece.
        tokens: number of tokens in the piece.
        likelihoods: likelihood of each token; empty if the request has no `logprobs`.
        finish: reason why the answer ends after this piece, "stop", "length" or "tool_calls"; None if the answer
            continues.
    """

    index: int
    read: Read = field(default_factory=Read)
    tokens: int = 0
    likelihoods: list[Likelihood] = field(default_factory=list)
    finish: str | None = None


async def write(
    engine: Engine,
    tokenizer: Any,
    stops: Sequence[str],
    reader: AnswerReader | BareReader | None,
    index: int,
    job: GenerationJob,
    most_calls: int | None,
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of one answer. The last piece has the reason why the answer ended.

    The text leaves out the engine's end tokens; `Piece.tokens` includes them. A complete answer is counted in the
    engine's metrics. If the caller closes the generator, decoding ends within one decode step.

    Args:
        engine: engine that decodes the answer.
        tokenizer: tokenizer of transformers.
        stops: stop strings; the answer ends before the first stop string. The text of the first `min_tokens` tokens of
            the job is not searched for stop strings.
        reader: parser of reasoning and tool calls, or None for plain text.
        index: number of the answer within its request, for `Piece.index`.
        job: the answer to decode.
        most_calls: maximum number of tool calls; None for no limit. Further calls are dropped.

    Raises:
        TimeoutError: the answer is not complete within the time limit.
        ParallelError: the workers cannot answer, or a logits processor raises an error.
    """
    text = Detokenizer(tokenizer, keep_special=isinstance(reader, AnswerReader))
    stopper = Stopper(stops)
    finish, called, count = "length", 0, 0

    def piece(tokens: list[int], likelihoods: list[Likelihood], last: bool = False) -> Piece:
        nonlocal called, count
        count += len(tokens)
        new = text.add([token for token in tokens if token not in engine.ends], last)
        shown = new if 0 < count <= job.min_tokens else stopper.add(new, last)
        read = Read(text=shown) if reader is None else reader.add(shown, last or stopper.stopped)
        if most_calls is not None:
            del read.calls[most_calls - called :]
        called += len(read.calls)
        return Piece(index, read, len(tokens), likelihoods)

    async with contextlib.aclosing(engine.generate(job)) as steps:
        async for new_tokens, new_likelihoods in steps:
            apart = [([one.token], [one]) for one in new_likelihoods] or [(new_tokens, [])]
            for tokens, likelihoods in apart:
                yield piece(tokens, likelihoods)
                if stopper.stopped or tokens[-1] in job.ends:
                    finish = "stop"
                    break
            if finish == "stop":
                break
    end = Piece(index) if stopper.stopped else piece([], [], last=True)
    end.finish = "tool_calls" if called and finish == "stop" else finish
    engine.metrics.ended(finish)
    yield end


async def write_all(
    engine: Engine,
    tokenizer: Any,
    stops: Sequence[str],
    reader: Callable[[], AnswerReader | BareReader | None],
    jobs: Sequence[GenerationJob],
    most_calls: int | None,
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of several concurrent answers in order of arrival. An error in one answer ends all answers.

    If the caller closes the generator, all answers end within one decode step.

    Args:
        engine: engine that decodes the answers.
        tokenizer: tokenizer of transformers.
        stops: stop strings; see `write`.
        reader: function that returns a parser of one answer; see `Chat.reader`.
        jobs: the answers to decode; `Piece.index` is a position in this sequence.
        most_calls: see `write`.

    Raises:
        TimeoutError, ParallelError: the first error of an answer; see `write`.
        ValueError: see `Chat.reader`.
    """
    pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    async def run(index: int, one: GenerationJob) -> None:
        try:
            async for piece in write(engine, tokenizer, stops, reader(), index, one, most_calls):
                pieces.put_nowait(piece)
        except Exception as error:
            pieces.put_nowait(error)

    tasks = [asyncio.create_task(run(index, one)) for index, one in enumerate(jobs)]
    try:
        left = len(tasks)
        while left:
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if piece.finish:
                left -= 1
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
