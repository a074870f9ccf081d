"""Active adapters of a model: read from the caller's modules for each call, set on the modules of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

SWITCHES = ("_active_adapter", "_disable_adapters")
"""Attributes of peft's layers that say which adapters are active: each call brings its own."""


@dataclass(frozen=True)
class ActiveAdapters:
    """The adapters that a call runs with.

    Attributes:
        settings: distinct settings of layers: names of the active adapters, whether all are off, and the
            scale of each.
        which: index into `settings` of each layer with adapters, in the model's order.
    """

    settings: tuple[tuple[tuple[str, ...], bool, tuple[tuple[str, float], ...]], ...]
    which: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[Any]) -> ActiveAdapters:
        """Read the active adapters of some layers."""
        each = [
            (tuple(layer.active_adapters), layer.disable_adapters, tuple(getattr(layer, "scaling", {}).items()))
            for layer in layers
        ]
        settings = {setting: index for index, setting in enumerate(dict.fromkeys(each))}
        return cls(tuple(settings), tuple(settings[setting] for setting in each))

    def with_one(self, name: str | None) -> ActiveAdapters:
        """Return the same with one adapter, or with none, unless all are off anyway."""
        settings = tuple((() if name is None else (name,), off, scaling) for _, off, scaling in self.settings)
        return replace(self, settings=settings)

    def activate(self, layers: Sequence[Any]) -> None:
        """Have the same layers of a rank compute with them."""
        for layer, index in zip(layers, self.which, strict=True):
            names, off, scaling = self.settings[index]
            layer._active_adapter, layer._disable_adapters = [*names], off
            getattr(layer, "scaling", {}).update(scaling)


def layers_with_adapters(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have switchable adapters or switchable copies of a layer."""
    return [module for module in model.modules() if "_active_adapter" in vars(module)]
