"""Turns the tokens of an answer into text up to a stop string, and separates reasoning and tool calls from the text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelformers_ng.serving.engine import Engine, GenerationJob
from parallelformers_ng.serving.processors import Likelihood
from parallelformers_ng.serving.tools import AnswerReader, Read

_UNFINISHED = "\ufffd"  # a tokenizer decodes the first bytes of an incomplete UTF-8 character to this character


class Detokenizer:
    """Incremental detokenizer, for streaming.

    The text of a token depends on earlier tokens: a token may add a space, or be a part of a UTF-8 character. So each
    call of `add` decodes the latest tokens with and without the new tokens; the new text is the difference.
    """

    def __init__(self, tokenizer: Any, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = not keep_special
        self._tokens: list[int] = []
        self._context, self._read = 0, 0

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Add tokens, and return the new text. An incomplete UTF-8 character waits for more tokens, unless `last`."""
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
    """Filter that cuts a streamed text before the first stop string.

    The filter withholds the end of the text while the end may be the beginning of a stop string.

    Attributes:
        stopped: whether the text has reached a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._delayed = ""
        self.stopped = False

    def add(self, text: str, last: bool = False) -> str:
        """Add text, and return the text that cannot belong to a stop string; if `last`, also the withheld text."""
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
    """New text of an answer, for one chunk of a stream."""

    index: int  # position of the answer among the answers to one request, from 0
    read: Read = field(default_factory=Read)
    tokens: int = 0
    likelihoods: list[Likelihood] = field(default_factory=list)  # empty if the request has no `logprobs`
    finish: str | None = None  # "stop", "length" or "tool_calls" if the answer ends here, else None


async def write(engine: Engine, tokenizer: Any, index: int, job: GenerationJob) -> AsyncGenerator[Piece, None]:
    """Generate one answer, and yield its pieces. The last piece has `finish`, the reason why the answer ended.

    The text has no end-of-sequence tokens, but `Piece.tokens` counts them. The engine's metrics count each answer that
    ends by itself. If the caller closes the generator, decoding ends within one decode step.
    """
    text = Detokenizer(tokenizer, keep_special=isinstance(job.reader, AnswerReader))
    stopper = Stopper(job.stops)
    finish, called, count = "length", 0, 0

    def piece(tokens: list[int], likelihoods: list[Likelihood], last: bool = False) -> Piece:
        nonlocal called, count
        count += len(tokens)
        new = text.add([token for token in tokens if token not in engine.ends], last)
        shown = new if 0 < count <= job.min_tokens else stopper.add(new, last)
        read = Read(text=shown) if job.reader is None else job.reader.add(shown, last or stopper.stopped)
        if job.max_calls is not None:
            del read.calls[job.max_calls - called :]
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


async def write_all(engine: Engine, tokenizer: Any, jobs: Sequence[GenerationJob]) -> AsyncGenerator[Piece, None]:
    """Generate several answers concurrently, and yield their pieces in order of arrival; `Piece.index` indexes `jobs`.

    An error in one answer ends all answers. If the caller closes the generator, all answers end within one decode step.
    """
    pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    async def run(index: int, job: GenerationJob) -> None:
        try:
            async for piece in write(engine, tokenizer, index, job):
                pieces.put_nowait(piece)
        except Exception as error:
            pieces.put_nowait(error)

    tasks = [asyncio.create_task(run(index, job)) for index, job in enumerate(jobs)]
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
