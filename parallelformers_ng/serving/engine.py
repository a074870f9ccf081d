"""The model behind a server: calls of `agenerate`, with their tokens as they come."""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng.batching.penalties import Penalties
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving.api_errors import ApiError, bad_request
from parallelformers_ng.serving.likelihoods import Likelihood, Recorder, likeliest
from parallelformers_ng.serving.metrics import Metrics
from parallelformers_ng.serving.models import peft_names
from parallelformers_ng.serving.serve_options import ServeOptions

_CANCEL_SECONDS = 60.0  # that ranks have to leave a call; workers that have not are started again
_LOGITS_BYTES = 1 << 30  # what the logits of a prompt may take, where its probabilities are asked for


@dataclass
class Places:
    """Places that are kept for the answers of a request.

    Attributes:
        left: how many of its answers have not begun.
    """

    left: int


@dataclass(frozen=True)
class Asked:
    """One answer to one prompt.

    Attributes:
        ids: the prompt.
        settings: values of `GenerationConfig` that differ from the model's own.
        seed: seed of its random stream.
        processors: processors of its scores.
        alternatives: how many of the likeliest tokens are told beside each, None if no probabilities are.
        ends: tokens that end it; None for those of the model.
        min_tokens: tokens that come before it may end.
        places: places of its request; None if none are counted.
        penalties: penalties on tokens; they come before `processors`.
        model: name of the model or adapter that answers.
        inputs: further inputs of the model, of pictures; with them the call runs alone.
    """

    ids: list[int]
    settings: dict[str, Any]
    seed: int
    processors: list[Any] = field(default_factory=list)
    alternatives: int | None = None
    ends: frozenset[int] | None = None
    min_tokens: int = 0
    places: Places | None = None
    penalties: Penalties | None = None
    model: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NewTokens:
    """New tokens of an answer, with a likelihood each where these were asked for."""

    tokens: list[int]
    likelihoods: list[Likelihood]


class Engine:
    """Runs calls of one parallelized model.

    Args:
        model: it should have `batching`, or calls run one after another.
        options: the limits.
        metrics: are told of calls, tokens and times.
        writes_text: whether it continues text.

    Attributes:
        vocabulary: how many tokens the model knows.
        positions: how many tokens a prompt and its answer may have.
        generates: whether it answers with text.
        longest: how many tokens a prompt may have.
        ends: the tokens that end an answer.
    """

    def __init__(self, model: Any, options: ServeOptions, metrics: Metrics, writes_text: bool) -> None:
        self.model = model
        self.options = options
        self.metrics = metrics
        text_config = model.config.get_text_config()
        self.vocabulary: int = text_config.vocab_size
        self.positions: int = getattr(text_config, "max_position_embeddings", None) or 1 << 20
        self.generates = writes_text
        self.longest = min(self.positions - self.generates, options.max_prompt_tokens or self.positions)
        ends = model.generation_config.eos_token_id if self.generates else None
        self.ends: set[int] = {ends} if isinstance(ends, int) else set(ends or ())
        self._adapters = peft_names(options)
        self._ping: asyncio.Future[Any] | None = None
        self._coming = 0  # answers that have a place, and have not begun

    @contextmanager
    def admitted(self, answers: int) -> Iterator[Places]:
        """Keep places for answers until they begin, or until the block ends.

        Args:
            answers: how many.

        Raises:
            ApiError: more would wait than may, status 503.
        """
        limit, taken = self.options.most_answers, self.metrics.in_flight + self._coming
        if taken + answers > limit:
            raise ApiError(
                503,
                f"{taken} answers are being written or wait, {answers} more are asked for, and {limit} may be at a time"
                " (--rows and --waiting); ask again later",
                code="overloaded",
            )
        self._coming += answers
        places = Places(answers)
        try:
            yield places
        finally:
            self._coming -= places.left

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one call of the model that writes no text, if it may be made; see `admitted`."""
        with self.admitted(1) as places, self.metrics.answering():
            self._begin(places)
            yield

    def _begin(self, places: Places | None) -> None:
        """Count one answer as being written, no longer as coming."""
        if places is not None and places.left:
            places.left -= 1
            self._coming -= 1

    def check_prompt(self, ids: list[int], longest: int | None = None) -> None:
        """Raise an error if the model cannot read a prompt.

        Args:
            ids: the prompt.
            longest: most tokens that it may have; by default those of prompts that text follows.
        """
        longest = self.longest if longest is None else longest
        if not ids:
            raise bad_request("the prompt has no tokens", "prompt")
        if len(ids) > longest:
            raise bad_request(
                f"the prompt has {len(ids)} tokens, and may have {longest}", "prompt", "context_length_exceeded"
            )
        if max(ids) >= self.vocabulary:
            raise bad_request(f"token {max(ids)} is not one of the {self.vocabulary} that the model has", "prompt")

    def answer_start(self, ids: list[int]) -> int:
        """Return how many tokens a sequence has before the answer to a prompt.

        A decoder continues the prompt. Beside an encoder, it begins with a token of its own.
        """
        return 1 if self.model.config.is_encoder_decoder else len(ids)

    async def generate(self, job: Asked) -> AsyncGenerator[NewTokens, None]:
        """Yield the tokens of one answer, as they come. Whoever stops asking for them ends the call within a step."""
        config = self._config(job)
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([job.ids]),
            "attention_mask": torch.ones(1, len(job.ids), dtype=torch.long),
            "generation_config": config,
            "seed": job.seed,
            "timeout": self.options.timeout + _CANCEL_SECONDS,
            **self._adapter(job.model),
            **job.inputs,
        }
        recorder = None if job.alternatives is None else Recorder(job.alternatives)
        processors = [each for each in (job.penalties, recorder, *job.processors) if each is not None]
        if processors:
            arguments["logits_processor"] = LogitsProcessorList(processors)
        news: asyncio.Queue[NewTokens | None] = asyncio.Queue()
        streamer = arguments["streamer"] = _Tokens(asyncio.get_running_loop(), news, recorder)
        end = asyncio.get_running_loop().time() + self.options.timeout
        with self.metrics.answering(len(job.ids)) as answer:
            self._begin(job.places)
            call = asyncio.ensure_future(self.model.agenerate(**arguments))
            call.add_done_callback(lambda _: news.put_nowait(None))
            try:
                while True:
                    async with asyncio.timeout_at(end):
                        step = await news.get()
                    if step is None:
                        break
                    answer.has(len(step.tokens))
                    yield step
                await call
                if rest := streamer.rest():
                    answer.has(len(rest.tokens))
                    yield rest
            finally:
                call.cancel()

    def _adapter(self, name: str | None) -> dict[str, Any]:
        """Return the argument that has a call run with the adapter of a model; none if there are no adapters."""
        return {"adapter_names": [self._adapters[name or self.options.name]]} if self._adapters else {}

    async def read(self, ids: list[int], alternatives: int, model: str | None = None) -> list[Likelihood]:
        """Return how likely each token of a prompt was, from the second on."""
        most = _LOGITS_BYTES // (4 * self.vocabulary)
        if len(ids) > most:
            raise bad_request(
                f"with echo and logprobs a prompt may have {most} tokens, and this has {len(ids)}", "prompt"
            )
        return await asyncio.to_thread(self._read, ids, alternatives, model)

    def _read(self, ids: list[int], alternatives: int, model: str | None) -> list[Likelihood]:
        places = (
            self.model(input_ids=torch.tensor([ids]), **self._adapter(model)).logits[0, :-1].float().log_softmax(-1)
        )
        return [
            Likelihood(token, float(place[token]), likeliest(place, alternatives))
            for token, place in zip(ids[1:], places, strict=True)
        ]

    async def ready(self, seconds: float) -> str:
        """Return why the ranks do not answer, "" if each of them has, to the others: within so many seconds, or
        with a token since."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(asyncio.to_thread(deployment_of(self.model).ping))
        begun = time.monotonic()
        await asyncio.wait({self._ping}, timeout=seconds)
        if not self._ping.done():
            return "" if self.metrics.last_token > begun else f"the ranks have not answered for {seconds:g} s"
        error = self._ping.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def _config(self, job: Asked) -> GenerationConfig:
        config = copy.deepcopy(self.model.generation_config)
        room = self.positions - len(job.ids)
        settings = {**job.settings, "max_new_tokens": min(job.settings["max_new_tokens"], room)}
        if "min_new_tokens" in settings:
            settings["min_new_tokens"] = min(settings["min_new_tokens"], settings["max_new_tokens"])
        config.update(max_length=None, **settings)
        if job.ends is not None:
            config.eos_token_id = sorted(job.ends)
        if config.pad_token_id is None:
            config.pad_token_id = next(iter(self.ends), 0)  # no row is padded, but transformers asks for one
        return config


def draw_seed() -> int:
    """Return a seed for who gives none: with one, calls that sample may share a batch."""
    return secrets.randbelow(1 << 63)


class _Tokens(BaseStreamer):
    """Brings tokens from the thread that decodes to the loop that serves, with their likelihoods if there are any:
    a call that runs alone tells these at its end.

    Args:
        loop: event loop of the server.
        news: queue of new tokens.
        recorder: recorder of the call's likelihoods, or None.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, news: asyncio.Queue[NewTokens | None], recorder: Recorder | None
    ) -> None:
        self._loop = loop
        self._news = news
        self._recorder = recorder
        self._is_prompt = True
        self._told = 0
        self._held: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._held += value.flatten().tolist()
        if self._recorder is None or self._recorder.knows(self._told + len(self._held) - 1):
            self._loop.call_soon_threadsafe(self._news.put_nowait, self.rest())

    def rest(self) -> NewTokens | None:
        """Return the tokens that are not told yet, None if there are none."""
        tokens, begin = self._held, self._told
        self._held, self._told = [], begin + len(tokens)
        if not tokens:
            return None
        if self._recorder is None:
            return NewTokens(tokens, [])
        return NewTokens(tokens, [self._recorder.of(begin + at, token) for at, token in enumerate(tokens)])

    def end(self) -> None:
        pass
