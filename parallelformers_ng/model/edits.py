"""Notices what the caller changes in a parallelized model's configurations and modules, to tell the workers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from torch import nn


class Snapshot:
    """The attributes of configurations, and of those within them, as they were.

    Args:
        configs: dotted name → any object whose state is its attributes, or None.
    """

    def __init__(self, configs: dict[str, Any]) -> None:
        self._roots = list(configs.items())
        self._parts = [
            (prefix, part, {name: _copied(value) for name, value in vars(part).items()})
            for root, config in configs.items()
            for prefix, part in _parts(config, f"{root}.")
        ]

    def still_holds(self, configs: dict[str, Any]) -> bool:
        """True where these are the same objects and nothing in them has changed. Costs microseconds: dicts compare the
        values that are the same objects by identity."""
        return (
            len(configs) == len(self._roots)
            and all(configs.get(root) is config for root, config in self._roots)
            and all(vars(part) == values for _, part, values in self._parts)
        )

    def values(self) -> dict[str, Any]:
        """Dotted name → value, of everything but the configurations within."""
        inner = {id(part) for _, part, _ in self._parts}
        return {
            prefix + name: value
            for prefix, _, values in self._parts
            for name, value in values.items()
            if id(value) not in inner
        }


class Edits:
    """What the caller has changed since the model was parallelized, and which of it the workers do not know yet.

    Args:
        model: the model, as the workers have it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = owners_of_configurations(model)
        self._built = Snapshot(self._configurations(model))  # what every new incarnation of the workers begins with
        self._attributes: dict[tuple[str, str], tuple[int, Any]] = {}  # (path, name) → when it was set, value
        self._count = 0
        self._lock = threading.Lock()
        # What the workers of an incarnation know: configurations, and all attributes that were set up to a time.
        self._known = (0, self._built, 0)

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """The module at `path` has a new value of an attribute."""
        with self._lock:
            self._count += 1
            self._attributes[path, name] = self._count, value
        if name in CONFIGURATIONS and (path, name) not in self._owners:
            self._owners.append((path, name))

    def changes(
        self, model: nn.Module, incarnation: int
    ) -> tuple[dict[str, Any], dict[tuple[str, str], Any], Callable[[], None]]:
        """What differs from what the workers of this incarnation have.

        Returns:
            Dotted name → value of attributes of configurations; (path, name) → value of attributes of modules; and what
            is to be called once the workers have them. A request that fails on its way has taught them nothing.
        """
        known_incarnation, known, time = self._known
        if known_incarnation != incarnation:
            known, time = self._built, 0
        configs, count = self._configurations(model), self._count
        if time == count and known.still_holds(configs):
            return {}, {}, _nothing
        current = Snapshot(configs)
        before, now = known.values(), current.values()
        with self._lock:
            attributes = {key: value for key, (then, value) in self._attributes.items() if then > time}

        def arrived() -> None:
            self._known = incarnation, current, count

        edited = {name: value for name, value in now.items() if name not in before or before[name] != value}
        return edited, attributes, arrived

    def _configurations(self, model: nn.Module) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: getattr(model.get_submodule(path) if path else model, name)
            for path, name in self._owners
        }


CONFIGURATIONS = ("config", "generation_config")
"""Attributes of modules that are configurations."""


def owners_of_configurations(model: nn.Module) -> list[tuple[str, str]]:
    """By which modules and attributes all configurations of a model are reached: the model's own first, then those that
    other modules have for themselves (T5's encoder a copy, a language model within another how it generates)."""
    found: set[int] = set()
    owners = []
    for path, module in model.named_modules():
        for name in CONFIGURATIONS:
            config = vars(module).get(name)
            if (not path and hasattr(module, name)) or (hasattr(config, "to_dict") and id(config) not in found):
                found |= {id(part) for _, part in _parts(config, "")}
                owners.append((path, name))
    return owners


def _parts(config: Any, prefix: str) -> list[tuple[str, Any]]:
    """A configuration and those within it, each with the dotted name that leads to it."""
    if config is None:
        return []
    found = [(prefix, config)]
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found += _parts(value, f"{prefix}{name}.")
    return found


def _copied(value: Any) -> Any:
    """The value, or a copy where it could change in place."""
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def _nothing() -> None:
    """The workers know it all."""
