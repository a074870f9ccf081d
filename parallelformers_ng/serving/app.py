"""Builds the web application of the server: the routes, the access guard, and the chat page."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from parallelformers_ng.serving import api_errors
from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.api_page import api_page
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.embeddings import Embeddings
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.generation import Generation
from parallelformers_ng.serving.guard import AccessGuard
from parallelformers_ng.serving.metrics import Metrics
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.models import Models
from parallelformers_ng.serving.pictures import Pictures
from parallelformers_ng.serving.pooling import Pooling
from parallelformers_ng.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from parallelformers_ng.serving.response_requests import ResponsesRequest
from parallelformers_ng.serving.score_requests import RerankRequest, ScoreRequest
from parallelformers_ng.serving.scores import Scores
from parallelformers_ng.serving.serve_options import ServeOptions
from parallelformers_ng.serving.status import Status
from parallelformers_ng.serving.transcription import Transcription

_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; frame-ancestors 'none'; base-uri 'none';"
    " form-action 'self'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


def create_app(model: Any, tokenizer: Any, options: ServeOptions, kind: Kind | None = None) -> AccessGuard:
    """Return the web application that serves a model.

    Args:
        model: parallelized model; calls share batches only if the model has `batching`.
        tokenizer: tokenizer of the model; for a model that reads pictures or transcribes sound, the processor. If the
            model lower-cases texts, the function changes the tokenizer's normalizer.
        options: limits of the server, and the model name for clients.
        kind: kind of model; by default text, or embeddings with normalized mean pooling if the model cannot generate.

    Returns:
        ASGI application, wrapped in the access guard.

    Raises:
        OSError, UnicodeDecodeError: the file of `chat_template` cannot be read.
        UnsupportedModelError: the model lower-cases texts, but its tokenizer is not a fast tokenizer.
    """
    template = None if options.chat_template is None else Path(options.chat_template).read_text()
    rows = options.rows * (options.replicas if options.launcher == "local" else 1)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    metrics = Metrics(options.name, rows, options.cache_tokens or rows * positions)
    kind = kind or Kind(None if model.can_generate() else Pooling())
    processor = tokenizer if hasattr(tokenizer, "tokenizer") else None
    tokenizer = getattr(processor, "tokenizer", tokenizer)
    engine = Engine(model, options, metrics, kind.writes_text)
    pictures = None if processor is None or kind.transcribes else Pictures(processor, options)
    chat = Chat(tokenizer, template, engine.longest, processor if pictures else None)
    generation, status = Generation(engine, chat, options, pictures), Status(engine, chat, options)
    transcription = Transcription(engine, processor if kind.transcribes else None, options)
    embeddings = Embeddings(engine, chat, options, kind.pooling)
    scores = Scores(engine, chat, options, kind.activation)
    # FastAPI's own page at /docs loads scripts from other sites; `api_page` builds a page without scripts.
    app = FastAPI(title="parallelformers_ng", docs_url=None, redoc_url=None)
    api_errors.install(app)
    if options.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )

    served = Models(options, status.began, engine.positions)

    def check_name(request: Any) -> None:
        request.model = served.named(request.model)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        """Continue one or several prompts."""
        check_name(request)
        return await generation.complete(request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: ChatRequest) -> Response:
        """Answer the last message of a chat."""
        check_name(request)
        return await generation.converse(request)

    @app.post("/v1/responses")
    async def responses(request: ResponsesRequest) -> Response:
        """Answer in the format of OpenAI's Responses API; the server stores no responses."""
        check_name(request)
        return await generation.respond(request)

    @app.post("/v1/embeddings")
    async def embed(request: EmbeddingRequest) -> dict[str, Any]:
        """Return one embedding vector for each text."""
        check_name(request)
        return await embeddings.embed(request)

    @app.post("/v1/score")
    @app.post("/score")
    async def score(request: ScoreRequest) -> dict[str, Any]:
        """Return a score for each pair of texts."""
        check_name(request)
        return await scores.score(request)

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(request: RerankRequest) -> dict[str, Any]:
        """Return documents sorted by their score against a query, best first."""
        check_name(request)
        return await scores.rerank(request)

    @app.post("/v1/audio/transcriptions")
    async def transcribe(request: Request) -> Response:
        """Transcribe sound. The form fields are `file`, `language`, `prompt`, `response_format` and `temperature`."""
        return await transcription.answer(request, served)

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids."""
        check_name(request)
        engine.check_prompt(request.tokens, engine.positions)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, request.tokens)}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """Return the token ids of a prompt, or of chat messages after the chat template."""
        check_name(request)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("send exactly one of prompt and messages")
        ids = await generation.tokenize(request)
        return {"count": len(ids), "max_model_len": engine.positions, "tokens": ids}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models and adapters of the server."""
        return {"object": "list", "data": [*served.cards.values()]}

    @app.get("/v1/models/{name:path}")
    async def model_named(name: str) -> dict[str, Any]:
        """Describe one model or adapter."""
        return served.cards[served.named(name)]

    for path, handler in (
        ("/health", status.health),
        ("/ready", status.ready),
        ("/metrics", status.metrics),
        ("/status", status.status),
        ("/plan", status.plan),
    ):
        app.add_api_route(path, handler, response_model=None)
    for path, (name, media_type) in _PAGE.items():
        content = (files("parallelformers_ng.serving") / "page" / name).read_bytes()
        app.add_api_route(path, _asset(content, media_type), include_in_schema=False)
    app.add_api_route("/docs", _asset(api_page(app), "text/html"), include_in_schema=False)
    return AccessGuard(app, options, metrics, reads_media=processor is not None)


def _asset(content: bytes | str, media_type: str) -> Any:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve
