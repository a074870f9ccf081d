"""Reads `fields.toml`: the fields of other servers' requests that this server refuses or ignores, and notes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

CHAT, RESPONSES, COMPLETIONS, EMBEDDINGS, SCORE, RERANK, TOKENIZE = ROUTES = (
    "/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize"
)  # fmt: skip


@dataclass(frozen=True)
class Unsupported:
    """A field that the server does not support.

    Attributes:
        routes: routes whose requests have the field.
        note: for a refused field, a hint such as a replacement; for an ignored field, the reason why it is harmless.
        harmless: values of a refused field that change nothing; the server accepts these values.
    """

    routes: tuple[str, ...]
    note: str
    harmless: tuple[Any, ...] = ()

    def takes(self, value: Any) -> bool:
        """Whether a value is harmless: None or in `harmless`. 1 equals 1.0 here, but not True."""
        return value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.harmless
        )


def _read(groups: list[dict[str, Any]]) -> dict[str, Unsupported]:
    paths = {path.rpartition("/")[2]: path for path in ROUTES} | {"chat": CHAT}
    fields = {}
    for group in groups:
        routes = tuple(paths[name] for name in group["routes"])
        for name in group["names"]:
            harmless = group["names"][name] if isinstance(group["names"], dict) else ()
            fields[name] = Unsupported(routes, group["note"], tuple(harmless))
    return fields


_TABLES = tomllib.loads(files("parallelformers_ng.serving").joinpath("fields.toml").read_text("utf-8"))
REFUSED, IGNORED = _read(_TABLES["refused"]), _read(_TABLES["ignored"])
"""Fields that the server refuses, because they would change the answer, and fields that do not change the answer."""
NOTES: dict[str, str] = _TABLES["notes"]
"""Notes on supported fields whose names do not explain the effect."""
