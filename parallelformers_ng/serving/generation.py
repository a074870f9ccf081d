"""Answers `/v1/completions`, `/v1/chat/completions` and `/v1/responses`, with one JSON object or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from parallelformers_ng.batching.penalties import Penalties
from parallelformers_ng.serving.answers import Piece, write_all
from parallelformers_ng.serving.api_errors import api_error, bad_request
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine, GenerationJob, Prompt, seed_of
from parallelformers_ng.serving.metrics import AnswerMetrics
from parallelformers_ng.serving.pictures import Pictures
from parallelformers_ng.serving.processors import Recorder
from parallelformers_ng.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from parallelformers_ng.serving.response_requests import ResponsesRequest
from parallelformers_ng.serving.response_shape import ResponseShape
from parallelformers_ng.serving.schemas import Schemas
from parallelformers_ng.serving.shapes import ChatShape, CompletionShape, Shape
from parallelformers_ng.serving.structured import ToolChoice, read_tool_choice


class Generation:
    """Handler of requests for generated text. An error after the start of a stream becomes an event of the stream."""

    def __init__(self, engine: Engine, chat: Chat, pictures: Pictures | None) -> None:
        self._engine = engine
        self._chat = chat
        self._pictures = pictures
        self._schemas = Schemas(chat.tokenizer, engine.vocabulary, engine.ends)

    async def complete(self, request: CompletionRequest) -> Response:
        """Continue one or several prompts."""
        name = self._engine.named(request.model)
        if request.max_tokens == 0 and not request.echo:
            raise bad_request("max_tokens is 0, which needs echo: true; set at least 1", "max_tokens")
        self._check(request, len(request.prompts))
        with self._engine.admitted((request.n or 1) * len(request.prompts)) as answers:
            special = request.add_special_tokens
            prompts: list[list[int]] = [
                await asyncio.to_thread(self._chat.ids, each, special) if isinstance(each, str) else each
                for each in request.prompts
            ]
            shape = CompletionShape(name, self._chat.tokenizer, request, prompts)
            if request.echo and request.logprobs is not None:
                for ids in prompts:
                    self._engine.check_prompt(ids)
                    shape.before.append(await self._engine.read(ids, request.logprobs, name))
            jobs = await self._jobs(request, [Prompt(ids) for ids in prompts], answers, ToolChoice())
            return await self._answer(request, shape, jobs)

    async def converse(self, request: ChatRequest) -> Response:
        """Answer the last message of a chat."""
        name = self._engine.named(request.model)
        return await self._converse(request, ChatShape(name, self._chat.tokenizer, request))

    async def respond(self, request: ResponsesRequest) -> Response:
        """Answer in the format of OpenAI's Responses API; the server stores no responses."""
        name, chat = self._engine.named(request.model), request.chat()
        return await self._converse(chat, ResponseShape(name, self._chat.tokenizer, chat, request))

    async def _converse(self, request: ChatRequest, shape: Shape) -> Response:
        self._check(request, 1)
        with self._engine.admitted(request.n or 1) as answers:
            choice = read_tool_choice(request.tools, request.tool_choice, request.parallel_tool_calls)
            prompt = await self._prompt(request, choice.tools)
            return await self._answer(request, shape, await self._jobs(request, [prompt], answers, choice))

    async def _prompt(self, request: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]]) -> Prompt:
        messages = request.messages or []
        text = await asyncio.to_thread(self._chat.prompt, messages, tools, request.template_arguments)
        special = request.add_special_tokens
        special = self._chat.needs_special_tokens(text) if special is None else special
        pictures = [address for message in messages for address in message.pictures]
        if not pictures or self._pictures is None:  # `Chat.prompt` refuses pictures if the model cannot read them
            return Prompt(await asyncio.to_thread(self._chat.ids, text, special), text=text)
        self._chat.check_length(text)
        inputs = await self._pictures.inputs(text, pictures, special)
        return Prompt(inputs.pop("input_ids")[0].tolist(), inputs, text)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Return the token ids of a prompt, or of chat messages in the chat template."""
        self._engine.named(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("send exactly one of prompt and messages")
        if request.messages is None:
            special = request.add_special_tokens is not False
            ids = await asyncio.to_thread(self._chat.ids, request.prompt or "", special)
        else:
            tools = [tool.model_dump() for tool in request.tools or ()]
            ids = (await self._prompt(request, tools)).ids
        return {"count": len(ids), "max_model_len": self._engine.positions, "tokens": ids}

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, str]:
        """Return the text of token ids."""
        self._engine.named(request.model)
        self._engine.check_prompt(request.tokens, self._engine.positions)
        return {"prompt": await asyncio.to_thread(self._chat.tokenizer.decode, request.tokens)}

    def _check(self, request: GenerationRequest, prompts: int) -> None:
        limits = self._engine.options
        if not self._engine.generates:
            raise bad_request("the model generates no text; see GET /docs for other routes", "model")
        for name, value, most in (
            ("n", (request.n or 1) * prompts, limits.max_choices),
            ("stop", len(request.stop), limits.max_stops),
            ("stop_token_ids", len(request.stop_token_ids), limits.max_stops),
            ("min_tokens", request.min_tokens, request.token_limit or limits.max_tokens),
            ("logprobs", request.alternatives or 0, limits.max_top_logprobs),
        ):
            if value > most:
                raise bad_request(f"{name}: the request needs {value}, but the limit is {most}", name)
        if not prompts:
            raise bad_request("the request has no prompt", "prompt")
        for name, tokens in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
            if any(token >= self._engine.vocabulary for token in tokens):
                raise bad_request(f"{name} has an unknown token; the model has {self._engine.vocabulary} tokens", name)
        if any(not 0 < len(stop) <= STOP_LENGTH for stop in request.stop):
            raise bad_request(f"a stop string is empty or too long; send 1 to {STOP_LENGTH} characters", "stop")

    async def _answer(self, request: GenerationRequest, shape: Shape, jobs: list[GenerationJob]) -> Response:
        shape.prompt_tokens = sum(len(job.prompt.ids) for job in jobs[:: request.n or 1])
        self._engine.metrics.took(shape.prompt_tokens)
        tokenizer = self._chat.tokenizer
        pieces = _no_tokens(len(jobs)) if request.token_limit == 0 else write_all(self._engine, tokenizer, jobs)
        if not request.stream:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    shape.add(piece)
            return JSONResponse(shape.whole())
        # Wait for the first piece, because an error before the response has begun can still set the HTTP status.
        first = await anext(pieces)
        return StreamingResponse(_events(first, pieces, shape), 200, _UNBUFFERED, "text/event-stream")

    async def _jobs(
        self, request: GenerationRequest, prompts: list[Prompt], answers: list[AnswerMetrics], choice: ToolChoice
    ) -> list[GenerationJob]:
        settings, seed = self._settings(request), seed_of(request.seed)
        constraint = request.constraint(self._chat.forced_calls(choice) if choice.forced else None)
        if constraint is not None and request.ignore_eos:
            raise bad_request(f"the request has ignore_eos and {constraint.param}; remove one of the two", "ignore_eos")
        ends = frozenset(request.stop_token_ids).union(() if request.ignore_eos else self._engine.ends)
        for prompt in prompts:
            self._engine.check_prompt(prompt.ids)
        grammar = None if constraint is None else await self._schemas.read(constraint)
        jobs = []
        for index, answer in enumerate(answers):
            at, number = divmod(index, request.n or 1)
            prompt = prompts[at]
            # Number of tokens before the answer: the decoder of an encoder-decoder model begins with one start token.
            start = 1 if self._engine.model.config.is_encoder_decoder else len(prompt.ids)
            penalties = None
            if request.penalizes:
                repetition = request.repetition_penalty or self._engine.model.generation_config.repetition_penalty
                presence, frequency = request.presence_penalty, request.frequency_penalty
                bias = tuple(request.logit_bias.items())
                penalties = Penalties(start, presence, frequency, repetition or 1.0, bias)
            recorder = None if request.alternatives is None else Recorder(request.alternatives)
            form = None if grammar is None else self._schemas.processor(grammar, start)
            jobs.append(
                GenerationJob(
                    prompt=prompt,
                    model=request.model,
                    settings=settings,
                    # The `n` answers to a prompt need different seeds, and an equal request must get equal seeds.
                    seed=(seed + number) % (1 << 63),
                    priority=request.priority,
                    processors=[each for each in (penalties, recorder, form) if each is not None],
                    recorder=recorder,
                    min_tokens=request.min_tokens,
                    ends=ends,
                    stops=request.stop,
                    reader=None if prompt.text is None else self._chat.reader(prompt.text, choice),
                    max_calls=choice.max_calls,
                    answer=answer,
                )
            )
        return jobs

    def _settings(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the attributes of the model's `GenerationConfig` that the request changes, with their new values."""
        model_config = self._engine.model.generation_config
        temperature = request.temperature
        if temperature is None:
            temperature = (model_config.temperature or 1.0) if model_config.do_sample else 1.0
        settings: dict[str, Any] = {"do_sample": temperature > 0, "temperature": temperature or None}
        settings["max_new_tokens"] = min(request.token_limit or self._engine.options.max_tokens, 1 << 31)
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", None)):
            value = getattr(request, name)
            if temperature == 0:
                settings[name] = None
            elif value is not None:
                settings[name] = off if value == -1 else value
            elif not model_config.do_sample:
                settings[name] = off  # without `do_sample`, the value is no choice of the model
        if request.penalizes:
            settings["repetition_penalty"] = 1.0  # 1 means none, because `Penalties` applies this penalty
        elif request.repetition_penalty is not None:
            settings["repetition_penalty"] = request.repetition_penalty
        if request.min_tokens:
            settings["min_new_tokens"] = request.min_tokens
        return settings


STOP_LENGTH = 256
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not delay a stream


async def _no_tokens(count: int) -> AsyncGenerator[Piece, None]:
    for index in range(count):
        yield Piece(index, finish="length")


async def _events(first: Piece, pieces: AsyncGenerator[Piece, None], shape: Shape) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(pieces):
        try:
            for chunk in itertools.chain(shape.opening(), shape.chunks(first)):
                yield shape.event(chunk)
            async for piece in pieces:
                for chunk in shape.chunks(piece):
                    yield shape.event(chunk)
            for chunk in shape.closing():
                yield shape.event(chunk)
        except Exception as error:  # the HTTP status is sent already, so the stream gets an event with the error
            yield shape.event(shape.failure(api_error(error)))
    if shape.end:
        yield shape.end
