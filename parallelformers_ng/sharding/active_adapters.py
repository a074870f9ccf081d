"""Reads the caller's active adapters for each call, and activates the same adapters on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

# Attributes of peft's layers that select the active adapters. They are not mirrored: each call sends their values.
SWITCHES = ("_active_adapter", "_disable_adapters")


@dataclass(frozen=True)
class ActiveAdapters:
    """The peft adapters that are active in one call, for each layer; the caller sends them to the ranks."""

    # Each different setting of a layer once: (names of the active adapters, whether adapters are disabled, (adapter
    # name, scaling) pairs).
    settings: tuple[tuple[tuple[str, ...], bool, tuple[tuple[str, float], ...]], ...]
    which: tuple[int, ...]  # index in `settings` for each layer with adapters, in the model's order

    @classmethod
    def of(cls, layers: Sequence[Any]) -> ActiveAdapters:
        """Read which adapters are active in `layers`, peft's layers of the caller's model."""
        each = [
            (tuple(layer.active_adapters), layer.disable_adapters, tuple(getattr(layer, "scaling", {}).items()))
            for layer in layers
        ]
        settings = {setting: index for index, setting in enumerate(dict.fromkeys(each))}
        return cls(tuple(settings), tuple(settings[setting] for setting in each))

    def with_one(self, name: str | None) -> ActiveAdapters:
        """Return a copy in which `name` is the only active adapter of every layer; None activates no adapter."""
        settings = tuple((() if name is None else (name,), off, scaling) for _, off, scaling in self.settings)
        return replace(self, settings=settings)

    def activate(self, layers: Sequence[Any]) -> None:
        """Set a rank's peft layers to the caller's active adapters; `layers` has the order that `of` had."""
        for layer, index in zip(layers, self.which, strict=True):
            names, off, scaling = self.settings[index]
            layer._active_adapter, layer._disable_adapters = [*names], off
            getattr(layer, "scaling", {}).update(scaling)


def layers_with_adapters(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "_active_adapter" in vars(module)]
