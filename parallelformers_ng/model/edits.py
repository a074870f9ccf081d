"""Notices what the caller changes in a model's configurations and modules after it was parallelized, to tell the
replicas."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from torch import nn


class Snapshot:
    """The attributes of configurations, and of those within them, as they were.

    Args:
        configs: dotted name → any object whose state is its attributes; None has none.
    """

    def __init__(self, configs: dict[str, Any]) -> None:
        self._roots = list(configs.items())
        self._parts = [
            (prefix, part, {name: _kept(value) for name, value in vars(part).items()})
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


class EditWatch:
    """Tells what the replicas do not know yet of some configurations: dotted name → configuration."""

    def __init__(self, configs: dict[str, Any]) -> None:
        self._built = Snapshot(configs)  # what every new incarnation of the workers begins with
        self._known = (0, self._built)

    def changes(self, configs: dict[str, Any], incarnation: int) -> tuple[dict[str, Any], Callable[[], None]]:
        """Attributes that differ from what the replicas of this incarnation have: dotted name → value.

        The second result is to be called once they have them. A request that fails on its way has taught them nothing.
        """
        known_incarnation, known = self._known
        if known_incarnation != incarnation:
            known = self._built
        if known.still_holds(configs):
            return {}, _nothing
        current = Snapshot(configs)
        before, now = known.values(), current.values()

        def arrived() -> None:
            self._known = (incarnation, current)

        return {name: value for name, value in now.items() if name not in before or before[name] != value}, arrived


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


class AttributeWatch:
    """Attributes of modules that were set after the model was parallelized, to tell the replicas."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: dict[tuple[str, str], tuple[int, Any]] = {}  # (path, name) → when it was set, value
        self._count = 0
        self._known = (0, 0)  # what the replicas of an incarnation know: all that was set up to a time

    def note(self, path: str, name: str, value: Any) -> None:
        """The module at `path` has a new value of an attribute."""
        with self._lock:
            self._count += 1
            self._set[path, name] = self._count, value

    def changes(self, incarnation: int) -> tuple[dict[tuple[str, str], Any], Callable[[], None]]:
        """What the replicas of this incarnation do not know; as `EditWatch.changes`."""
        known_incarnation, known = self._known
        if known_incarnation != incarnation:
            known = 0
        if known == self._count:
            return {}, _nothing
        with self._lock:
            count = self._count
            news = {key: value for key, (time, value) in self._set.items() if time > known}

        def arrived() -> None:
            self._known = (incarnation, count)

        return news, arrived


def _parts(config: Any, prefix: str) -> list[tuple[str, Any]]:
    """A configuration and those within it, each with the dotted name that leads to it."""
    if config is None:
        return []
    found = [(prefix, config)]
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found += _parts(value, f"{prefix}{name}.")
    return found


def _kept(value: Any) -> Any:
    """The value, or a copy where it could change in place."""
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def _nothing() -> None:
    """The replicas know it all."""
