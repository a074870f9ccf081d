"""Builds the web application of the server: the routes, the access guard, the chat page, and the page `/docs`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from jinja2 import Environment
from starlette.responses import Response

from parallelformers_ng.serving import api_errors
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.fields import IGNORED, NOTES, REFUSED
from parallelformers_ng.serving.forwards import Forwards
from parallelformers_ng.serving.generation import Generation
from parallelformers_ng.serving.guard import AccessGuard
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.pictures import Pictures
from parallelformers_ng.serving.serve_options import ServeOptions, read_text
from parallelformers_ng.serving.status import Status
from parallelformers_ng.serving.transcription import Transcription

_FOLDER = files("parallelformers_ng.serving") / "page"
_PAGE = (("/", "index.html", "html"), ("/page.css", "page.css", "css"), ("/page.js", "page.js", "javascript"))
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; frame-ancestors 'none';"
    " base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def create_app(model: Any, tokenizer: Any, options: ServeOptions, kind: Kind) -> AccessGuard:
    """Build the web application that serves a model, wrapped in the access guard.

    For a model that reads pictures or transcribes sound, `tokenizer` is the transformers processor. If the model
    lower-cases texts, the function changes the tokenizer's normalizer.
    """
    template = None if options.chat_template is None else read_text(options.chat_template, "chat_template")
    processor = tokenizer if hasattr(tokenizer, "tokenizer") else None
    tokenizer = getattr(processor, "tokenizer", tokenizer)
    engine = Engine(model, options, kind.writes_text)
    pictures = None if processor is None or kind.transcribes else Pictures(processor, options)
    chat = Chat(tokenizer, template, engine.longest, processor if pictures else None)
    generation, status = Generation(engine, chat, pictures), Status(engine, chat)
    transcription = Transcription(engine, processor if kind.transcribes else None)
    forwards = Forwards(engine, chat, kind.pooling, kind.activation)
    # FastAPI's own page at /docs is off, because it loads scripts from other sites.
    app = FastAPI(title="parallelformers_ng", docs_url=None, redoc_url=None)
    api_errors.install(app)
    for handler, *paths in (
        (generation.complete, "/v1/completions"),
        (generation.converse, "/v1/chat/completions"),
        (generation.respond, "/v1/responses"),
        (forwards.embed, "/v1/embeddings"),
        (forwards.score, "/v1/score", "/score"),
        (forwards.rerank, "/v1/rerank", "/v2/rerank", "/rerank"),
        (transcription.answer, "/v1/audio/transcriptions"),
        (generation.detokenize, "/detokenize"),
        (generation.tokenize, "/tokenize"),
    ):
        for path in paths:
            app.add_api_route(path, handler, methods=["POST"])  # the page `/docs` shows the docstring of the handler

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models and adapters of the server."""
        return {"object": "list", "data": [*engine.cards.values()]}

    @app.get("/v1/models/{name:path}")
    async def model_named(name: str) -> dict[str, Any]:
        """Describe one model or adapter."""
        return engine.cards[engine.named(name)]

    for told in (status.health, status.ready, status.metrics, status.status, status.plan):
        app.add_api_route(f"/{told.__name__}", told)
    for path, name, text_kind in _PAGE:
        app.add_api_route(path, _asset((_FOLDER / name).read_bytes(), text_kind), include_in_schema=False)
    app.add_api_route("/docs", _asset(_api_page(app), "html"), include_in_schema=False)
    return AccessGuard(app, options, engine.metrics, reads_media=processor is not None)


def _asset(content: bytes | str, text_kind: str) -> Any:
    async def serve() -> Response:
        return Response(content, media_type=f"text/{text_kind}", headers=_HEADERS)

    return serve


def _api_page(app: FastAPI) -> str:
    """Return the page `/docs`, with a table of the request fields of each route of the application."""
    schema, routes = app.openapi(), []
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json")
            name = body["schema"]["$ref"].rpartition("/")[2] if body else None
            rows = _fields(path, schema["components"]["schemas"][name]) if name else []
            routes.append({"method": method.upper(), "path": path, "text": route["description"], "fields": rows})
    page = Environment(autoescape=True, trim_blocks=True).from_string((_FOLDER / "docs.html").read_text("utf-8"))
    return page.render(routes=routes)


def _fields(path: str, body: dict[str, Any]) -> list[tuple[str, str, str]]:
    """List (name, kind, note) of a route's request fields: first supported, then refused, then ignored fields."""
    required = body.get("required", ())
    rows = [(name, "needed" if name in required else "", NOTES.get(name, "")) for name in body["properties"]]
    for kind, table in (("refused", REFUSED), ("ignored", IGNORED)):
        rows += [(name, kind, field.note) for name, field in table.items() if path in field.routes]
    return rows
