"""One answer as it is written: tokens to text, up to a stop string, with its reasoning and tool calls apart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelformers_ng.serving.bare_calls import BareReader
from parallelformers_ng.serving.engine import Asked, Engine
from parallelformers_ng.serving.likelihoods import Likelihood
from parallelformers_ng.serving.text import Detokenizer, Stopper
from parallelformers_ng.serving.tools import AnswerReader, Read


@dataclass
class Piece:
    """A new piece of an answer.

    Attributes:
        index: number of the answer within its request.
        read: its text, reasoning and tool calls.
        tokens: how many tokens it has.
        likelihoods: likelihood of each token, if the request asks for them.
        finish: why the answer ends with it, "stop", "length" or "tool_calls"; None if it goes on.
    """

    index: int
    read: Read = field(default_factory=Read)
    tokens: int = 0
    likelihoods: list[Likelihood] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True)
class Form:
    """How the tokens of a request's answers become pieces.

    Attributes:
        tokenizer: tokenizer of transformers.
        stops: strings that an answer ends before.
        reader: makes what takes reasoning and tool calls out, or None.
    """

    tokenizer: Any
    stops: Sequence[str]
    reader: Callable[[], AnswerReader | BareReader | None]


async def write(engine: Engine, form: Form, index: int, job: Asked) -> AsyncGenerator[Piece, None]:
    """Yield one answer, piece by piece. The last says why it ended."""
    reader = form.reader()
    text = Detokenizer(form.tokenizer, keep_special=isinstance(reader, AnswerReader))
    stopper = Stopper(form.stops)
    ends = engine.ends if job.ends is None else job.ends
    finish, called, count = "length", False, 0

    def piece(tokens: list[int], likelihoods: list[Likelihood], last: bool = False) -> Piece:
        nonlocal called, count
        count += len(tokens)
        new = text.add([token for token in tokens if token not in engine.ends], last)
        shown = new if 0 < count <= job.min_tokens else stopper.add(new, last)
        read = Read(text=shown) if reader is None else reader.add(shown)
        if reader is not None and (last or stopper.stopped):
            end = reader.end()
            read = Read(read.text + end.text, read.reasoning + end.reasoning, read.calls + end.calls)
        called = called or bool(read.calls)
        return Piece(index, read, len(tokens), likelihoods)

    async with contextlib.aclosing(engine.generate(job)) as steps:
        async for step in steps:
            apart = [([one.token], [one]) for one in step.likelihoods] or [(step.tokens, [])]
            for tokens, likelihoods in apart:
                yield piece(tokens, likelihoods)
                if stopper.stopped or tokens[-1] in ends:
                    finish = "stop"
                    break
            if finish == "stop":
                break
    end = Piece(index) if stopper.stopped else piece([], [], last=True)
    end.finish = "tool_calls" if called and finish == "stop" else finish
    engine.metrics.ended(finish)
    yield end


async def write_all(engine: Engine, form: Form, jobs: Sequence[Asked]) -> AsyncGenerator[Piece, None]:
    """Several answers at once, their pieces as they come. An error in one ends all."""
    pieces: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def run(index: int, one: Asked) -> None:
        try:
            async with contextlib.aclosing(write(engine, form, index, one)) as stream:
                async for piece in stream:
                    pieces.put_nowait(piece)
            pieces.put_nowait(None)
        except Exception as error:
            pieces.put_nowait(error)

    tasks = [asyncio.create_task(run(index, one)) for index, one in enumerate(jobs)]
    try:
        left = len(tasks)
        while left:
            piece = await pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
