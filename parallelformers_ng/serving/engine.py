"""Runs the model of a server: calls `agenerate` and streams the tokens to the handlers of requests."""

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

from parallelformers_ng.checkpoint.location import base_of_adapter
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving.api_errors import ApiError, bad_request
from parallelformers_ng.serving.bare_calls import BareReader
from parallelformers_ng.serving.metrics import AnswerMetrics, Metrics
from parallelformers_ng.serving.processors import Likelihood, Recorder, likeliest
from parallelformers_ng.serving.serve_options import ServeOptions
from parallelformers_ng.serving.tools import AnswerReader

_CANCEL_SECONDS = 60.0  # workers that need longer to stop a canceled call are restarted
_LOGITS_BYTES = 1 << 30  # `echo` with `logprobs` is refused for a prompt whose logits need more memory


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)  # further model inputs, such as `pixel_values`
    text: str | None = None  # prompt of a chat as text, for the parser of the answer; None without a chat


@dataclass(frozen=True)
class GenerationJob:
    """Everything the engine needs to generate one answer to one prompt."""

    prompt: Prompt
    model: str | None  # name of the model or adapter that answers; None for the model
    settings: dict[str, Any]  # attributes to change in the model's `GenerationConfig`; always has `max_new_tokens`
    seed: int
    priority: int  # answers with a lower number get rows of the batch first
    processors: list[Any]  # logits processors, in the order in which they run
    recorder: Recorder | None  # the item of `processors` that records log-probabilities, if any
    min_tokens: int  # stop strings in the first `min_tokens` tokens do not end the answer
    ends: frozenset[int]  # ids of tokens that end the answer
    stops: list[str]  # the answer ends before the first stop string
    reader: AnswerReader | BareReader | None  # parser of reasoning and tool calls; None if the answer is plain text
    max_calls: int | None  # maximum number of tool calls; the server drops further calls
    answer: AnswerMetrics  # metrics of this answer, one of those that `Engine.admitted` yields


NewTokens = tuple[list[int], list[Likelihood]]  # the second list is empty if the job has no recorder


class Engine:
    """Engine that runs the calls of one parallelized model.

    Attributes:
        positions: maximum number of tokens in a prompt plus its answer; 2**20 if the model's configuration has no
            `max_position_embeddings`.
        longest: maximum number of tokens in a prompt.
        ends: ids of tokens that end an answer; empty for a model that generates no text.
        cards: name of the model or of an adapter → its entry in `/v1/models`.
    """

    def __init__(self, model: Any, options: ServeOptions, writes_text: bool) -> None:
        self.model = model
        self.options = options
        text_config = model.config.get_text_config()
        self.vocabulary: int = text_config.vocab_size
        self.positions: int = getattr(text_config, "max_position_embeddings", None) or 1 << 20
        rows = options.max_answers - options.waiting
        self.metrics = Metrics(options.name, rows, options.cache_tokens or rows * self.positions)
        common = {"object": "model", "created": int(time.time()), "owned_by": "parallelformers_ng"}
        common["max_model_len"] = self.positions
        self.cards: dict[str, dict[str, Any]] = {options.name: {"id": options.name, **common}}
        self.cards |= {name: {"id": name, "parent": options.name, **common} for name in options.adapters}
        self.generates = writes_text
        self.longest = min(self.positions - self.generates, options.max_prompt_tokens or self.positions)
        ends = model.generation_config.eos_token_id if self.generates else None
        self.ends: set[int] = {ends} if isinstance(ends, int) else set(ends or ())
        self._adapters = peft_names(options)
        self._ping: asyncio.Future[Any] | None = None

    def named(self, name: str | None) -> str:
        """Return the name if it is a model or an adapter of this server, else raise an error; None is the model."""
        name = name or self.options.name
        if name not in self.cards:
            known = " and ".join(map(repr, self.cards))
            raise ApiError(404, f"the server has no model {name!r}; it has {known}", "model", "model_not_found")
        return name

    @contextmanager
    def admitted(self, count: int) -> Iterator[list[AnswerMetrics]]:
        """Reserve capacity for `count` answers inside the block, or raise an ApiError with status 503 if the server is
        full. The block's end frees the capacity of answers that `generate` did not begin."""
        limit, occupied = self.options.max_answers, self.metrics.in_flight
        if occupied + count > limit:
            why = f"the server has {occupied} answers running or waiting, and the request needs {count} more"
            advice = f"the limit is {limit} (--rows plus --waiting); send the request again later"
            raise ApiError(503, f"{why}; {advice}", code="overloaded")
        answers = [self.metrics.arrive() for _ in range(count)]
        try:
            yield answers
        finally:
            for answer in answers:
                if not answer.started:
                    self.metrics.leave(answer)

    def check_prompt(self, ids: list[int], longest: int | None = None) -> None:
        longest = self.longest if longest is None else longest
        if not ids:
            raise bad_request("the prompt has no tokens", "prompt")
        if len(ids) > longest:
            message = f"the prompt has {len(ids)} tokens; the limit is {longest}"
            raise bad_request(message, "prompt", "context_length_exceeded")
        if max(ids) >= self.vocabulary:
            raise bad_request(f"the prompt has token {max(ids)}; the model has {self.vocabulary} tokens", "prompt")

    async def generate(self, job: GenerationJob) -> AsyncGenerator[NewTokens, None]:
        """Yield the new tokens of one answer after each decode step.

        If the job has a recorder and cannot be batched, all tokens come at the end of the call. The end of the answer
        frees its capacity (see `admitted`). If the caller closes the generator, the call ends within one decode step.
        TimeoutError is raised after the server's `timeout`, which includes the wait for a batch slot.
        """
        ids = torch.tensor([job.prompt.ids])
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "generation_config": self._config(job),
            "seed": job.seed,
            "priority": job.priority,
            "timeout": self.options.timeout + _CANCEL_SECONDS,
            **self._adapter(job.model),
            **job.prompt.inputs,
        }
        if job.processors:
            arguments["logits_processor"] = LogitsProcessorList(job.processors)
        queue: asyncio.Queue[NewTokens | None] = asyncio.Queue()
        streamer = arguments["streamer"] = _Tokens(asyncio.get_running_loop(), queue, job.recorder)
        end = asyncio.get_running_loop().time() + self.options.timeout
        call = asyncio.ensure_future(self.model.agenerate(**arguments))
        call.add_done_callback(lambda _: queue.put_nowait(None))
        job.answer.started, job.answer.prompt = True, len(job.prompt.ids)
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
        return {"adapter_names": [self._adapters[name or self.options.name]]} if self._adapters else {}

    async def read(self, ids: list[int], alternatives: int, model: str | None = None) -> list[Likelihood]:
        """Compute the log-probability of each token of a prompt, except the first token, in one forward pass."""
        most = _LOGITS_BYTES // (4 * self.vocabulary)
        if len(ids) > most:
            raise bad_request(f"the prompt has {len(ids)} tokens; with echo and logprobs the limit is {most}", "prompt")
        return await asyncio.to_thread(self._read, ids, alternatives, model)

    @torch.no_grad()
    def _read(self, ids: list[int], alternatives: int, model: str | None) -> list[Likelihood]:
        logits = self.model(input_ids=torch.tensor([ids]), **self._adapter(model)).logits[0, :-1]
        rows = zip(ids[1:], logits.float().log_softmax(-1), strict=True)
        return [Likelihood(token, float(row[token]), likeliest(row, alternatives)) for token, row in rows]

    async def ready(self, seconds: float) -> str:
        """Return "" if the ranks complete a collective or send a token within `seconds`, else why they are late."""
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
        room = self.positions - len(job.prompt.ids)
        settings = {**job.settings, "max_new_tokens": min(job.settings["max_new_tokens"], room)}
        if "min_new_tokens" in settings:
            settings["min_new_tokens"] = min(settings["min_new_tokens"], settings["max_new_tokens"])
        config.update(max_length=None, **settings)
        config.eos_token_id = sorted(job.ends)
        if config.pad_token_id is None:
            config.pad_token_id = next(iter(self.ends), 0)  # `generate` requires a pad token, but pads nothing
        return config


def peft_names(options: ServeOptions) -> dict[str, str]:
    """Map the names that clients use for the model and its adapters to PEFT's adapter names; {} without adapters.

    The model's own name maps to the base model, or to the adapter in the model's folder if the folder is an adapter.
    """
    if not options.adapters:
        return {}
    # PEFT allows no dots in adapter names, so PEFT gets numbered names.
    names = {name: f"adapter{number}" for number, name in enumerate(options.adapters)}
    return {options.name: "__base__" if base_of_adapter(options.model) is None else "default", **names}


def seed_of(seed: int | None) -> int:
    """Convert a request's seed to a number from 0 to 2**63 - 1; a request without a seed gets a random seed.

    Without any seed, sampling would draw from the caller's torch generator, and such calls cannot be batched.
    """
    return secrets.randbelow(1 << 63) if seed is None else seed % (1 << 63)


@dataclass(eq=False)
class _Tokens(BaseStreamer):
    """Streamer that sends tokens and log-probabilities from the decoding thread to the event loop of the server.

    A call that is not batched returns its log-probabilities only at the end of the call.
    """

    loop: asyncio.AbstractEventLoop  # the server's event loop, in another thread than the decoding
    queue: asyncio.Queue[NewTokens | None]
    recorder: Recorder | None
    _is_prompt: bool = True
    _streamed: int = 0
    _unsent: list[int] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._unsent += value.flatten().tolist()
        if self.recorder is None or self._streamed + len(self._unsent) <= len(self.recorder.top):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, self.rest())

    def rest(self) -> NewTokens | None:
        """Remove and return the tokens that are not streamed yet; None if all are streamed."""
        tokens, begin = self._unsent, self._streamed
        self._unsent, self._streamed = [], begin + len(tokens)
        if not tokens:
            return None
        if self.recorder is None:
            return tokens, []
        return tokens, [self.recorder.of(begin + at, token) for at, token in enumerate(tokens)]

    def end(self) -> None:
        pass
