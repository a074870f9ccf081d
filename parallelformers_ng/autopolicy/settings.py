"""Reads and changes configurations, even if a class renames an attribute or refuses a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig


def setting(config: Any, name: str) -> Any:
    """Return a configuration's attribute by its own name or by transformers' standard name; None if there is none."""
    return vars(config).get(stored_name(config, name))


def number(config: Any, *names: str) -> int:
    """Return the first of the named attributes of a configuration that is an integer; 0 if none is."""
    values = (setting(config, name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def put(config: Any, name: str, value: Any) -> None:
    """Set an attribute by its own or its standard name, even if the configuration's class refuses changes."""
    config.__dict__[stored_name(config, name)] = value


def limit(config: Any, name: str, most: int) -> None:
    """Reduce an attribute that is a larger integer to `most`."""
    if number(config, name) > most:
        put(config, name, most)


def mapped(value: Any, change: Callable[[int], int]) -> Any:
    """Return an integer, or nested lists of integers, with each integer changed; other values stay."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return change(value) if type(value) is int else value


def own_settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of a configuration's integers, lists, tuples and dictionaries.

    Nested configurations, booleans, and names that begin with "_" are left out.
    """
    for name, value in vars(config).items():
        if name.startswith("_") or isinstance(value, (PreTrainedConfig, bool)):
            continue
        if isinstance(value, (int, list, tuple, dict)):
            yield name, value


def parts_of(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def is_id(name: str) -> bool:
    return name.endswith(("_id", "_ids", "token_index"))


def stored_name(config: Any, name: str) -> str:
    names = getattr(type(config), "attribute_map", None) or {}
    return str(names.get(name, name))
