"""Reading and changing configurations, also those that keep an attribute under another name or refuse a change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def setting(config: Any, name: str) -> Any:
    """Return an attribute of a configuration under its own or its standard name, None if it is absent or is a list."""
    return vars(config).get(stored_name(config, name))


def put(config: Any, name: str, value: Any) -> None:
    """Set an attribute, by its own or its standard name, also where a configuration refuses to have it changed."""
    config.__dict__[stored_name(config, name)] = value


def own_settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Numbers, lists and dictionaries of a configuration, those of the configurations inside it left out."""
    for name, value in vars(config).items():
        if name.startswith("_") or isinstance(value, (PreTrainedConfig, bool)):
            continue
        if isinstance(value, (int, list, tuple, dict)):
            yield name, value


def parts_of(config: Any) -> Iterator[Any]:
    """Yield the configuration and all those inside it, however deep."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def counts_heads(name: str) -> bool:
    """Return whether an attribute counts heads."""
    return name.endswith(("heads", "n_head"))


def is_id(name: str) -> bool:
    """Return whether an attribute holds ids of tokens."""
    return name.endswith(("_id", "_ids", "token_index"))


def stored_name(config: Any, name: str) -> str:
    """Under which name a configuration keeps what has this standard name."""
    names = getattr(type(config), "attribute_map", None) or {}
    return str(names.get(name, name))
