"""Reads and changes configurations, even if a class renames an attribute or refuses a change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def setting(config: Any, name: str) -> Any:
    """Return the value of a configuration's attribute by its own or its standard name; None without the attribute."""
    return vars(config).get(stored_name(config, name))


def put(config: Any, name: str, value: Any) -> None:
    """Set an attribute by its own or its standard name, even if the configuration's class refuses changes."""
    config.__dict__[stored_name(config, name)] = value


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


def counts_heads(name: str) -> bool:
    return name.endswith(("heads", "n_head")) and not name.startswith("index")


def is_id(name: str) -> bool:
    return name.endswith(("_id", "_ids", "token_index"))


def stored_name(config: Any, name: str) -> str:
    names = getattr(type(config), "attribute_map", None) or {}
    return str(names.get(name, name))
