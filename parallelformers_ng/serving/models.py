"""Lists the model names that clients may use: the name of the model, and the names of its adapters."""

from __future__ import annotations

import time
from typing import Any

from parallelformers_ng.checkpoint.location import base_of_adapter
from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.serve_options import ServeOptions


class Models:
    """Table of a server's model and adapters.

    Attributes:
        cards: map from the name of each model or adapter to its entry in `/v1/models`.
    """

    def __init__(self, options: ServeOptions, positions: int) -> None:
        self._name = options.name
        common = {"object": "model", "created": int(time.time()), "owned_by": "parallelformers_ng"}
        common["max_model_len"] = positions
        self.cards: dict[str, dict[str, Any]] = {self._name: {"id": self._name, **common}}
        self.cards |= {name: {"id": name, "parent": self._name, **common} for name in options.adapters}

    def named(self, name: str | None) -> str:
        """Return the name if it is a model or an adapter of this server, else raise an error; None is the model."""
        name = name or self._name
        if name not in self.cards:
            known = " and ".join(map(repr, self.cards))
            raise ApiError(404, f"the server has no model {name!r}; it has {known}", "model", "model_not_found")
        return name


def peft_names(options: ServeOptions) -> dict[str, str]:
    """Map the names that clients use for the model and its adapters to PEFT's adapter names; {} without adapters.

    The model's own name maps to the base model, or to the adapter in the model's folder if the folder is an adapter.
    """
    if not options.adapters:
        return {}
    # PEFT allows no dots in adapter names, so PEFT gets numbered names.
    names = {name: f"adapter{number}" for number, name in enumerate(options.adapters)}
    return {options.name: "__base__" if base_of_adapter(options.model) is None else "default", **names}
