"""Builds the page `/docs`, which lists the routes of the server and the fields of their requests without scripts."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI

from parallelformers_ng.serving.fields import IGNORED, NOTES, REFUSED

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


def api_page(app: FastAPI) -> str:
    """Return an HTML page with a section for each route and a table of the route's request fields.

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
    rows += [(name, "refused", field.instead) for name, field in REFUSED.items() if path in field.routes]
    rows += [(name, "ignored", field.why) for name, field in IGNORED.items() if path in field.routes]
    cells = "".join(
        f'<tr><th scope="row"><code>{escape(name)}</code></th><td>{kind}</td><td>{escape(note)}</td></tr>'
        for name, kind, note in rows
    )
    head = '<tr><th scope="col">Field</th><th scope="col">Kind</th><th scope="col">Effect or replacement</th></tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Fields of {path}">'
        f"<table><thead>{head}</thead><tbody>{cells}</tbody></table></div>"
    )
