"""Builds the web application of the server: the routes, the access guard, the chat page, and the page `/docs`."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
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

_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
</head>
<body>
<header><h1>Routes and fields of the API</h1></header>
<main class="documents">
<p><a href="./">Chat page</a>, <a href="openapi.json">OpenAPI schema for programs</a>. The routes follow the APIs of
OpenAI and vLLM. Set <code>base_url</code> of OpenAI's client to the address of this server followed by
<code>/v1</code>.</p>
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; frame-ancestors 'none';"
    " base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


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
        ParallelError: the file of `chat_template` cannot be read.
        UnsupportedModelError: the model lower-cases texts, but its tokenizer is not a fast tokenizer.
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
    # FastAPI's own page at /docs loads scripts from other sites; `_api_page` builds a page without scripts.
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
    app.add_api_route("/docs", _asset(_api_page(app), "text/html"), include_in_schema=False)
    return AccessGuard(app, options, engine.metrics, reads_media=processor is not None)


def _asset(content: bytes | str, media_type: str) -> Any:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve


def _api_page(app: FastAPI) -> str:
    """Return the page `/docs`: HTML with a section for each route and a table of the route's request fields.

    Args:
        app: application that has all its routes already.
    """
    schema = app.openapi()
    parts = [_HEAD]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"<section><h2>{method.upper()} {escape(path)}</h2><p>{escape(route['description'])}</p>")
            body = route.get("requestBody", {}).get("content", {}).get("application/json")
            if body:
                name = body["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(path, schema["components"]["schemas"][name]))
            parts.append("</section>\n")
    return "".join([*parts, "</main>\n</body>\n</html>\n"])


def _fields(path: str, body: dict[str, Any]) -> str:
    """Return an HTML table of request fields: first supported fields, then refused fields, then ignored fields."""
    rows = [
        (name, "needed" if name in body.get("required", ()) else "", NOTES.get(name, "")) for name in body["properties"]
    ]
    for kind, table in (("refused", REFUSED), ("ignored", IGNORED)):
        rows += [(name, kind, field.note) for name, field in table.items() if path in field.routes]
    cells = "".join(
        f'<tr><th scope="row"><code>{escape(name)}</code></th><td>{kind}</td><td>{escape(note)}</td></tr>'
        for name, kind, note in rows
    )
    head = '<tr><th scope="col">Field</th><th scope="col">Kind</th><th scope="col">Effect or replacement</th></tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Fields of {path}">'
        f"<table><thead>{head}</thead><tbody>{cells}</tbody></table></div>"
    )
