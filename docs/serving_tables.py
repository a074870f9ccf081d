"""Writes the tables of `docs/serving.md` from the code: `python docs/serving_tables.py`. A test compares them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path

from parallelformers_ng.serving import (
    generation,
    guard,
    pictures,
    processors,
    requests,
    response_requests,
    score_requests,
)
from parallelformers_ng.serving.fields import IGNORED, NOTES, REFUSED, ROUTES
from parallelformers_ng.serving.serve_options import ServeOptions, option_texts

PAGE = Path(__file__).parent / "serving.md"


def options() -> str:
    """Return the options of the server: name, default, meaning."""
    rows = []
    for option in fields(ServeOptions):
        default = "" if option.default in (None, "", False, MISSING) else f"`{option.default}`"
        rows.append((f"`{option.name}`", default, option_texts()[option.name]))
    return _table(("option", "default", "what"), rows)


def request_fields() -> str:
    """Return what becomes of each field of a request, by route."""
    classes = (
        requests.ChatRequest,
        response_requests.ResponsesRequest,
        requests.CompletionRequest,
        requests.EmbeddingRequest,
        score_requests.ScoreRequest,
        score_requests.RerankRequest,
        requests.TokenizeRequest,
    )
    acting = {cls.route: cls.model_fields for cls in classes}
    rows = []
    for name in sorted({*REFUSED, *IGNORED, *(name for known in acting.values() for name in known)}):
        kinds = [
            "acts"
            if name in acting[route]
            else "refused"
            if name in REFUSED and route in REFUSED[name].routes
            else "ignored"
            if name in IGNORED and route in IGNORED[name].routes
            else ""
            for route in ROUTES
        ]
        notes = [NOTES.get(name, "")]
        if name in REFUSED:
            values = ", ".join(f"`{_json(value)}`" for value in REFUSED[name].harmless)
            notes.append(f"{REFUSED[name].note}{f' ({values} is taken)' if values else ''}")
        if name in IGNORED:
            notes.append(IGNORED[name].note)
        rows.append((f"`{name}`", *kinds, "; ".join(filter(None, notes))))
    return _table(
        (
            "field",
            "chat",
            "responses",
            "completions",
            "embeddings",
            "score",
            "rerank",
            "tokenize",
            "what it does, or what to do instead",
        ),
        rows,
    )


def limits() -> str:
    """Return the limits that no option sets."""
    rows = [
        ("bytes of a body that waits for its turn", f"{guard.LARGE_BYTES:,}"),
        ("bytes a second that such bodies are read with", f"{guard.LARGE_BYTES_A_SECOND:,}"),
        ("refusals a second", f"{guard.REFUSALS_A_SECOND:,}"),
        ("bytes of all headers", f"{guard.MAX_HEADER_BYTES:,}"),
        ("messages of a chat", f"{requests.MAX_MESSAGES:,}"),
        ("tokens of `logit_bias`", f"{requests.MAX_BIASES:,}"),
        ("long side of a picture to its short one", f"{pictures.MAX_RATIO:,}"),
        ("characters of a stop string", f"{generation.STOP_LENGTH:,}"),
        ("characters of a grammar or schema", f"{processors.MAX_CHARACTERS:,}"),
        ("symbols of a grammar, ten for a property", f"{processors.MAX_SYMBOLS:,}"),
    ]
    return _table(("limit", "value"), rows)


TABLES = {"options": options, "fields": request_fields, "limits": limits}


def written(page: str) -> str:
    """Return the text of a page with its tables made anew."""
    for name, table in TABLES.items():
        page, count = re.subn(
            rf"(<!-- table: {name} -->\n).*?(<!-- end -->)",
            lambda match, table=table: match[1] + "\n" + table() + "\n\n" + match[2],  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
        assert count == 1, f"the page has {count} tables of {name}"
    return page


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
