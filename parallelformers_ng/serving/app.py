"""Builds the web application of the server: the routes, the access guard, and the chat page."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from parallelformers_ng.serving import api_errors
from parallelformers_ng.serving.api_page import api_page
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.forwards import Forwards
from parallelformers_ng.serving.generation import Generation
from parallelformers_ng.serving.guard import AccessGuard
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.pictures import Pictures
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


def create_app(model: Any, tokenizer: Any, options: ServeOptions, kind: Kind) -> AccessGuard:
    """Return the web application that serves a model.

    Args:
        model: parallelized model; calls share batches only if the model has `batching`.
        tokenizer: tokenizer of the model; for a model that reads pictures or transcribes sound, the processor. If the
            model lower-cases texts, the function changes the tokenizer's normalizer.
        options: limits of the server, and the model name for clients.
        kind: kind of the model.

    Returns:
        ASGI application, wrapped in the access guard.

    Raises:
        OSError, UnicodeDecodeError: the file of `chat_template` cannot be read.
        UnsupportedModelError: the model lower-cases texts, but its tokenizer is not a fast tokenizer.
    """
    template = None if options.chat_template is None else Path(options.chat_template).read_text()
    processor = tokenizer if hasattr(tokenizer, "tokenizer") else None
    tokenizer = getattr(processor, "tokenizer", tokenizer)
    engine = Engine(model, options, kind.writes_text)
    pictures = None if processor is None or kind.transcribes else Pictures(processor, options)
    chat = Chat(tokenizer, template, engine.longest, processor if pictures else None)
    generation, status = Generation(engine, chat, pictures), Status(engine, chat)
    transcription = Transcription(engine, processor if kind.transcribes else None)
    forwards = Forwards(engine, chat, kind.pooling, kind.activation)
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

    for text, handler, *paths in (
        ("Continue one or several prompts.", generation.complete, "/v1/completions"),
        ("Answer the last message of a chat.", generation.converse, "/v1/chat/completions"),
        (
            "Answer in the format of OpenAI's Responses API; the server stores no responses.",
            generation.respond,
            "/v1/responses",
        ),
        ("Return one embedding vector for each text.", forwards.embed, "/v1/embeddings"),
        ("Return a score for each pair of texts.", forwards.score, "/v1/score", "/score"),
        (
            "Return documents sorted by their score against a query, best first.",
            forwards.rerank,
            *("/v1/rerank", "/v2/rerank", "/rerank"),
        ),
        (
            "Transcribe sound. The form fields are `file`, `language`, `prompt`, `response_format` and `temperature`.",
            transcription.answer,
            "/v1/audio/transcriptions",
        ),
        ("Return the text of token ids.", generation.detokenize, "/detokenize"),
        (
            "Return the token ids of a prompt, or of chat messages after the chat template.",
            generation.tokenize,
            "/tokenize",
        ),
    ):
        for path in paths:
            app.add_api_route(path, handler, methods=["POST"], description=text)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models and adapters of the server."""
        return {"object": "list", "data": [*engine.models.cards.values()]}

    @app.get("/v1/models/{name:path}")
    async def model_named(name: str) -> dict[str, Any]:
        """Describe one model or adapter."""
        return engine.models.cards[engine.models.named(name)]

    for told in (status.health, status.ready, status.metrics, status.status, status.plan):
        app.add_api_route(f"/{told.__name__}", told)
    for path, (name, media_type) in _PAGE.items():
        content = (files("parallelformers_ng.serving") / "page" / name).read_bytes()
        app.add_api_route(path, _asset(content, media_type), include_in_schema=False)
    app.add_api_route("/docs", _asset(api_page(app), "text/html"), include_in_schema=False)
    return AccessGuard(app, options, engine.metrics, reads_media=processor is not None)


def _asset(content: bytes | str, media_type: str) -> Any:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve
