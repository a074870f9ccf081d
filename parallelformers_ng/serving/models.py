"""The names that clients may ask for: the model's, and those of adapters that are in it."""

from __future__ import annotations

from typing import Any

from parallelformers_ng.checkpoint.location import base_of_adapter
from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.serve_options import ServeOptions


class Models:
    """The models of a server.

    Args:
        options: the model and its adapters.

    Attributes:
        name: name of the model itself.
        cards: entry of each model in `/v1/models`, by its name.
    """

    def __init__(self, options: ServeOptions, created: int, positions: int) -> None:
        self.name = options.name
        common = {"object": "model", "created": created, "owned_by": "parallelformers_ng", "max_model_len": positions}
        self.cards: dict[str, dict[str, Any]] = {self.name: {"id": self.name, **common}}
        self.cards |= {name: {"id": name, "parent": self.name, **common} for name in options.adapters}

    def named(self, name: str | None) -> str:
        """Return the name of the model that a request means.

        Args:
            name: name in the request; None or "" for the model itself.

        Raises:
            ApiError: there is no such model, status 404.
        """
        name = name or self.name
        if name not in self.cards:
            known = " or ".join(map(repr, self.cards))
            raise ApiError(404, f"there is no model {name!r} here; it is {known}", "model", "model_not_found")
        return name


def peft_names(options: ServeOptions) -> dict[str, str]:
    """Return PEFT's name of each adapter by the name that clients know; empty if no adapters are named.

    The model's own name stands for it without an adapter, or with that of its folder.
    """
    if not options.adapters:
        return {}
    names = {name: f"adapter{number}" for number, name in enumerate(options.adapters)}  # PEFT's have no dots
    return {options.name: "__base__" if base_of_adapter(options.model) is None else "default", **names}
