"""Answers `/v1/completions`, `/v1/chat/completions` and `/v1/responses`, with one JSON object or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from parallelformers_ng.batching.penalties import Penalties
from parallelformers_ng.serving.answers import Piece, write_all
from parallelformers_ng.serving.api_errors import api_error, bad_request
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine, GenerationJob, draw_seed
from parallelformers_ng.serving.metrics import AnswerMetrics
from parallelformers_ng.serving.pictures import Pictures
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


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request.

    Attributes:
        ids: token ids of the prompt.
        inputs: additional model inputs from pictures.
    """

    ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)


class Generation:
    """Handler of requests for generated text.

    Args:
        engine: engine of the model.
        chat: tokenizer of the model.
        pictures: reader of pictures; None if the model reads only text.
    """

    def __init__(self, engine: Engine, chat: Chat, pictures: Pictures | None) -> None:
        self._engine = engine
        self._chat = chat
        self._pictures = pictures
        self._schemas = Schemas(chat.tokenizer, engine.vocabulary, engine.ends)

    async def complete(self, request: CompletionRequest) -> Response:
        """Answer a request to `/v1/completions`.

        Returns:
            JSON response with the complete answers, or with `stream` a stream of server-sent events. After the first
            piece of a stream, an error becomes an event of the stream.

        Raises:
            ApiError: the request is invalid, status 400. Or the model name is unknown, status 404. Or no place is free,
                status 503. Or the request has a constraint, but the package llguidance is missing, status 501.
            TimeoutError: the answers are not complete within the time limit.
            ParallelError: the workers cannot answer.
            ValueError: llguidance cannot read the tokenizer, or transformers cannot read its response template.
        """
        name = self._engine.models.named(request.model)
        if request.max_tokens == 0 and not request.echo:
            raise bad_request("max_tokens is 0, which needs echo: true; set at least 1", "max_tokens")
        self._check(request, len(request.prompts))
        with self._engine.admitted((request.n or 1) * len(request.prompts)) as answers:
            prompts = [
                Prompt(
                    await asyncio.to_thread(self._chat.ids, prompt, request.add_special_tokens)
                    if isinstance(prompt, str)
                    else prompt
                )
                for prompt in request.prompts
            ]
            shape = CompletionShape(name, self._chat.tokenizer, request, [prompt.ids for prompt in prompts])
            if request.echo and request.logprobs is not None:
                for prompt in prompts:
                    self._engine.check_prompt(prompt.ids)
                    shape.before.append(await self._engine.read(prompt.ids, request.logprobs, name))
            return await self._answer(request, prompts, shape, lambda: None, answers, ToolChoice())

    async def converse(self, request: ChatRequest) -> Response:
        """Answer a request to `/v1/chat/completions`; the result is the same as in `complete`.

        Raises:
            ApiError: see `complete`. Or a message or a tool is invalid, or no chat template accepts the messages,
                status 400.
            TimeoutError, ParallelError, ValueError: see `complete`.
        """
        name = self._engine.models.named(request.model)
        return await self._converse(request, ChatShape(name, self._chat.tokenizer, request))

    async def respond(self, request: ResponsesRequest) -> Response:
        """Answer a request to `/v1/responses`; the result is the same as in `complete`.

        Raises:
            ApiError, TimeoutError, ParallelError, ValueError: see `converse`.
        """
        name, chat = self._engine.models.named(request.model), request.chat()
        return await self._converse(chat, ResponseShape(name, self._chat.tokenizer, chat, request))

    async def _converse(self, request: ChatRequest, shape: Shape) -> Response:
        self._check(request, 1)
        with self._engine.admitted(request.n or 1) as answers:
            choice = read_tool_choice(request.tools, request.tool_choice, request.parallel_tool_calls)
            text = await asyncio.to_thread(
                self._chat.prompt, request.messages, choice.tools, request.template_arguments
            )
            prompt = await self._prompt(request, text)
            return await self._answer(
                request, [prompt], shape, lambda: self._chat.reader(text, choice), answers, choice
            )

    async def _prompt(self, request: ChatRequest | TokenizeRequest, text: str) -> Prompt:
        """Return the prompt of a chat, with additional model inputs if the chat has pictures."""
        special = request.add_special_tokens
        special = self._chat.begins_with_special(text) if special is None else special
        pictures = [address for message in request.messages or () for address in message.pictures]
        if not pictures or self._pictures is None:  # without a reader of pictures, `Chat.prompt` has refused pictures
            return Prompt(await asyncio.to_thread(self._chat.ids, text, special))
        self._chat.check_length(text)
        inputs = await self._pictures.inputs(text, pictures, special)
        ids = inputs.pop("input_ids")
        return Prompt(ids[0].tolist(), inputs)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Answer a request to `/tokenize` with the token ids of a prompt or a chat.

        Args:
            request: request with a prompt or with messages. Without `add_special_tokens`, the tokenizer adds special
                tokens to a prompt, and `Chat.begins_with_special` decides for a chat.

        Returns:
            JSON object in vLLM's format. The token ids include the tokens that stand for pictures.

        Raises:
            ApiError: status 404: the model name is unknown. Status 400: the request has neither a prompt nor messages,
                or both. The text is too long or invalid, or a picture cannot be read. Or no chat template
                accepts the messages, or two fields of the chat template contradict each other.
        """
        self._engine.models.named(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("send exactly one of prompt and messages")
        if request.messages is None:
            special = request.add_special_tokens is not False
            ids = await asyncio.to_thread(self._chat.ids, request.prompt or "", special)
        else:
            tools = [tool.model_dump() for tool in request.tools or ()]
            text = await asyncio.to_thread(self._chat.prompt, request.messages, tools, request.template_arguments)
            ids = (await self._prompt(request, text)).ids
        return {"count": len(ids), "max_model_len": self._engine.positions, "tokens": ids}

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, str]:
        """Answer a request to `/detokenize` with the text of the tokens.

        Raises:
            ApiError: the model name is unknown, status 404. Or the tokens are invalid or too many, status 400.
        """
        self._engine.models.named(request.model)
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
            ("min_tokens", request.min_tokens, request.most_tokens or limits.max_tokens),
            ("logprobs", request.alternatives or 0, limits.max_top_logprobs),
        ):
            if value > most:
                raise bad_request(f"{name}: the request needs {value}, but the limit is {most}", name)
        if not prompts:
            raise bad_request("the request has no prompt", "prompt")
        for name, tokens in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
            if any(token >= self._engine.vocabulary for token in tokens):
                raise bad_request(
                    f"{name} has an unknown token id; the model has {self._engine.vocabulary} tokens", name
                )
        if any(not 0 < len(stop) <= STOP_LENGTH for stop in request.stop):
            raise bad_request(f"a stop string is empty or too long; send 1 to {STOP_LENGTH} characters", "stop")

    async def _answer(
        self,
        request: GenerationRequest,
        prompts: list[Prompt],
        shape: Shape,
        reader: Callable[[], Any],
        answers: list[AnswerMetrics],
        choice: ToolChoice,
    ) -> Response:
        jobs = await self._jobs(request, prompts, answers, choice)
        self._engine.metrics.took(sum(len(prompt.ids) for prompt in prompts))
        shape.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        pieces = (
            _no_tokens(len(jobs))
            if request.most_tokens == 0
            else write_all(self._engine, self._chat.tokenizer, request.stop, reader, jobs, choice.most_calls)
        )
        if not request.stream:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    shape.add(piece)
            return JSONResponse(shape.whole())
        # An error before the first piece is sent with its own HTTP status.
        first = await anext(pieces)
        return StreamingResponse(_events(first, pieces, shape), 200, _UNBUFFERED, "text/event-stream")

    async def _jobs(
        self, request: GenerationRequest, prompts: list[Prompt], answers: list[AnswerMetrics], choice: ToolChoice
    ) -> list[GenerationJob]:
        settings = self._settings(request)
        seed = draw_seed() if request.seed is None else request.seed
        constraint = request.constraint(self._chat.forced_calls(choice) if choice.forced else None)
        if constraint is not None and request.ignore_eos:
            raise bad_request(
                f"the request has ignore_eos and {constraint.param}; remove one of the two fields", "ignore_eos"
            )
        ends = frozenset() if request.ignore_eos else frozenset(self._engine.ends)
        ends |= frozenset(request.stop_token_ids)
        for prompt in prompts:
            self._engine.check_prompt(prompt.ids)
        grammar = None if constraint is None else await self._schemas.read(constraint)
        jobs = []
        for index, answer in enumerate(answers):
            at, number = divmod(index, request.n or 1)
            prompt = prompts[at]
            # The answer of an encoder-decoder model begins after one start token, and does not continue the prompt.
            start = 1 if self._engine.model.config.is_encoder_decoder else len(prompt.ids)
            penalties = None
            if request.penalizes:
                repetition = request.repetition_penalty or self._engine.model.generation_config.repetition_penalty
                bias = tuple(request.logit_bias.items())
                penalties = Penalties(
                    start, request.presence_penalty, request.frequency_penalty, repetition or 1.0, bias
                )
            jobs.append(
                GenerationJob(
                    prompt.ids,
                    settings,
                    # Each answer of a request has its own seed, and the same request seed gives the same answers.
                    (seed + number) % (1 << 63),
                    [] if grammar is None else [self._schemas.processor(grammar, start)],
                    request.alternatives,
                    ends,
                    request.min_tokens,
                    answer,
                    penalties,
                    request.model,
                    prompt.inputs,
                )
            )
        return jobs

    def _settings(self, request: GenerationRequest) -> dict[str, Any]:
        """Return values of `GenerationConfig` from a request; other values come from the model's own configuration."""
        settings: dict[str, Any] = {
            "max_new_tokens": min(request.most_tokens or self._engine.options.max_tokens, 1 << 31)
        }
        model_config = self._engine.model.generation_config
        temperature = request.temperature
        if temperature is None:
            temperature = (model_config.temperature or 1.0) if model_config.do_sample else 1.0
        settings |= {"do_sample": temperature > 0, "temperature": temperature or None}
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", None)):
            value = getattr(request, name)
            if temperature == 0:
                settings[name] = None
            elif value is not None:
                settings[name] = off if value == -1 else value
            elif not model_config.do_sample:
                settings[name] = off  # the configuration has only transformers' default, not the authors' choice
        if request.repetition_penalty is not None:
            settings["repetition_penalty"] = request.repetition_penalty
        if request.penalizes:
            settings["repetition_penalty"] = 1.0  # `Penalties` applies it, because the order of penalties matters
        if request.min_tokens:
            settings["min_new_tokens"] = request.min_tokens
        return settings


STOP_LENGTH = 256
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # headers that stop proxies from buffering


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
        except Exception as error:  # the HTTP status is sent already, so the error becomes an event
            yield shape.event(shape.failure(api_error(error)))
    if shape.end:
        yield shape.end
