"""Runs the model of a server: calls `agenerate` and streams the tokens to the handlers of requests."""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng.batching.penalties import Penalties
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving.api_errors import ApiError, bad_request
from parallelformers_ng.serving.metrics import AnswerMetrics, Metrics
from parallelformers_ng.serving.models import Models, peft_names
from parallelformers_ng.serving.processors import Likelihood, Recorder, likeliest
from parallelformers_ng.serving.serve_options import ServeOptions

_CANCEL_SECONDS = 60.0  # time for ranks to stop a canceled call; workers that take longer are restarted
_LOGITS_BYTES = 1 << 30  # memory limit for the logits of a prompt, if a request has `echo` and `logprobs`


@dataclass(frozen=True)
class GenerationJob:
    """Job of the engine: one answer to one prompt.

    Attributes:
        ids: token ids of the prompt.
        settings: values of `GenerationConfig` that differ from the model's own. The key `max_new_tokens` is required;
            the engine lowers its value to the number of positions after the prompt.
        seed: seed of the sampling.
        processors: logits processors.
        alternatives: number of most likely tokens to return at each position; None to return no probabilities.
        ends: ids of tokens that end the answer.
        min_tokens: minimum number of tokens in the answer.
        answer: place of the answer, from `Engine.admitted`.
        penalties: penalties on tokens; penalties are applied before `processors`.
        model: name of the model or adapter that answers; None for the model.
        inputs: additional model inputs from pictures; a call with additional inputs runs alone, not in a batch.
    """

    ids: list[int]
    settings: dict[str, Any]
    seed: int
    processors: list[Any]
    alternatives: int | None
    ends: frozenset[int]
    min_tokens: int
    answer: AnswerMetrics
    penalties: Penalties | None
    model: str | None
    inputs: dict[str, Any]


NewTokens = tuple[list[int], list[Likelihood]]
"""Ids of new tokens of an answer, and the likelihood of each token; no likelihoods if the job has no `alternatives`."""


class Engine:
    """Engine that runs the calls of one parallelized model.

    Args:
        model: parallelized model; without `batching`, calls run one after another.
        options: limits of the server.
        writes_text: whether the model generates text.

    Attributes:
        model, options: the arguments of the same names.
        metrics: counters of calls, tokens and times.
        models: names of the model and its adapters.
        vocabulary: number of tokens in the vocabulary.
        positions: maximum number of tokens in a prompt plus its answer; 2**20 if the model's configuration has no
            `max_position_embeddings`.
        generates: whether the model generates text.
        longest: maximum number of tokens in a prompt.
        ends: ids of tokens that end an answer; empty for a model that generates no text.

    Raises:
        OSError, ValueError, KeyError: the options have adapters, and `adapter_config.json` cannot be read.
    """

    def __init__(self, model: Any, options: ServeOptions, writes_text: bool) -> None:
        self.model = model
        self.options = options
        text_config = model.config.get_text_config()
        self.vocabulary: int = text_config.vocab_size
        self.positions: int = getattr(text_config, "max_position_embeddings", None) or 1 << 20
        rows = options.most_answers - options.waiting
        self.metrics = Metrics(options.name, rows, options.cache_tokens or rows * self.positions)
        self.models = Models(options, self.positions)
        self.generates = writes_text
        self.longest = min(self.positions - self.generates, options.max_prompt_tokens or self.positions)
        ends = model.generation_config.eos_token_id if self.generates else None
        self.ends: set[int] = {ends} if isinstance(ends, int) else set(ends or ())
        self._adapters = peft_names(options)
        self._ping: asyncio.Future[Any] | None = None

    @contextmanager
    def admitted(self, count: int) -> Iterator[list[AnswerMetrics]]:
        """Yield places for answers. The place of an answer that `generate` has not begun is free when the block ends.

        Args:
            count: number of answers.

        Raises:
            ApiError: not enough places are free, status 503.
        """
        limit, occupied = self.options.most_answers, self.metrics.in_flight
        if occupied + count > limit:
            raise ApiError(
                503,
                f"the server has {occupied} answers running or waiting, and the request needs {count} more; the limit"
                f" is {limit} (--rows plus --waiting); send the request again later",
                code="overloaded",
            )
        answers = [self.metrics.arrive() for _ in range(count)]
        try:
            yield answers
        finally:
            for answer in answers:
                if not answer.started:
                    self.metrics.leave(answer)

    def check_prompt(self, ids: list[int], longest: int | None = None) -> None:
        """Raise an error if the model cannot read a prompt.

        Args:
            ids: token ids of the prompt.
            longest: maximum number of tokens in the prompt; by default `Engine.longest`.

        Raises:
            ApiError: the prompt is empty, too long, or has an unknown token, status 400.
        """
        longest = self.longest if longest is None else longest
        if not ids:
            raise bad_request("the prompt has no tokens", "prompt")
        if len(ids) > longest:
            raise bad_request(
                f"the prompt has {len(ids)} tokens; the limit is {longest}", "prompt", "context_length_exceeded"
            )
        if max(ids) >= self.vocabulary:
            raise bad_request(f"the prompt has token {max(ids)}; the model has {self.vocabulary} tokens", "prompt")

    async def generate(self, job: GenerationJob) -> AsyncGenerator[NewTokens, None]:
        """Yield the new tokens of one answer after each decode step.

        A job with `alternatives` that runs alone yields all tokens at the end of the call. The place of the answer is
        free after its end. If the caller closes the generator, the call ends within one decode step.

        Args:
            job: the answer to decode.

        Raises:
            TimeoutError: the answer is not complete within the server's `timeout`, which includes the wait for a row.
            ParallelError: the workers cannot answer, or a logits processor raises an error.
        """
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
        queue: asyncio.Queue[NewTokens | None] = asyncio.Queue()
        streamer = arguments["streamer"] = _Tokens(asyncio.get_running_loop(), queue, recorder)
        end = asyncio.get_running_loop().time() + self.options.timeout
        call = asyncio.ensure_future(self.model.agenerate(**arguments))
        call.add_done_callback(lambda _: queue.put_nowait(None))
        job.answer.started, job.answer.prompt = True, len(job.ids)
        try:
            while True:
                async with asyncio.timeout_at(end):
                    step = await queue.get()
                if step is None:
                    break
                self.metrics.wrote(job.answer, len(step[0]))
                yield step
            await call
            if rest := streamer.rest():
                self.metrics.wrote(job.answer, len(rest[0]))
                yield rest
        finally:
            call.cancel()
            self.metrics.leave(job.answer)

    def _adapter(self, name: str | None) -> dict[str, Any]:
        """Return the keyword argument that chooses the adapter; an empty dict if the server has no adapters."""
        return {"adapter_names": [self._adapters[name or self.options.name]]} if self._adapters else {}

    async def read(self, ids: list[int], alternatives: int, model: str | None = None) -> list[Likelihood]:
        """Return the likelihood of each token of a prompt, beginning with the second token.

        Args:
            ids: token ids of the prompt.
            alternatives: number of most likely tokens to return at each position.
            model: name of the model or adapter that reads; None for the model.

        Raises:
            ApiError: the float32 logits of the prompt exceed 1 GiB, status 400.
            ParallelError: the workers cannot answer.
        """
        most_tokens = _LOGITS_BYTES // (4 * self.vocabulary)
        if len(ids) > most_tokens:
            raise bad_request(
                f"the prompt has {len(ids)} tokens; with echo and logprobs the limit is {most_tokens}", "prompt"
            )
        return await asyncio.to_thread(self._read, ids, alternatives, model)

    @torch.no_grad()
    def _read(self, ids: list[int], alternatives: int, model: str | None) -> list[Likelihood]:
        places = (
            self.model(input_ids=torch.tensor([ids]), **self._adapter(model)).logits[0, :-1].float().log_softmax(-1)
        )
        return [
            Likelihood(token, float(place[token]), likeliest(place, alternatives))
            for token, place in zip(ids[1:], places, strict=True)
        ]

    async def ready(self, seconds: float) -> str:
        """Return the reason why the ranks do not answer, or "" if the ranks answer.

        The ranks answer if all ranks complete a collective ping, or send a token, within the given seconds.

        Args:
            seconds: time limit for the answer of the ranks.
        """
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(asyncio.to_thread(deployment_of(self.model).ping))
        start = time.monotonic()
        await asyncio.wait({self._ping}, timeout=seconds)
        if not self._ping.done():
            return "" if self.metrics.last_token > start else f"the ranks have not answered for {seconds:g} s"
        error = self._ping.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def _config(self, job: GenerationJob) -> GenerationConfig:
        config = copy.deepcopy(self.model.generation_config)
        room = self.positions - len(job.ids)
        settings = {**job.settings, "max_new_tokens": min(job.settings["max_new_tokens"], room)}
        if "min_new_tokens" in settings:
            settings["min_new_tokens"] = min(settings["min_new_tokens"], settings["max_new_tokens"])
        config.update(max_length=None, **settings)
        config.eos_token_id = sorted(job.ends)
        if config.pad_token_id is None:
            config.pad_token_id = next(iter(self.ends), 0)  # no row is padded, but transformers needs a pad token
        return config


def draw_seed() -> int:
    """Return a random seed from 0 to 2**63 - 1, for a request without a seed.

    A sampling call without a seed cannot share a batch if the model draws from the caller's generator.
    """
    return secrets.randbelow(1 << 63)


class _Tokens(BaseStreamer):
    """Streamer that sends tokens and likelihoods from the decoding thread to the event loop of the server.

    A call that runs alone returns its likelihoods only at the end of the call.

    Args:
        loop: event loop of the server.
        queue: queue of new tokens.
        recorder: recorder of the call's likelihoods, or None.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[NewTokens | None], recorder: Recorder | None
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._recorder = recorder
        self._is_prompt = True
        self._streamed = 0
        self._unsent: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._unsent += value.flatten().tolist()
        if self._recorder is None or self._streamed + len(self._unsent) <= len(self._recorder.top):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, self.rest())

    def rest(self) -> NewTokens | None:
        """Return the tokens that have not been streamed yet, or None if every token has been streamed."""
        tokens, begin = self._unsent, self._streamed
        self._unsent, self._streamed = [], begin + len(tokens)
        if not tokens:
            return None
        if self._recorder is None:
            return tokens, []
        return tokens, [self._recorder.of(begin + at, token) for at, token in enumerate(tokens)]

    def end(self) -> None:
        pass
