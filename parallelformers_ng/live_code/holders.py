"""Reads classes, globals of modules and registries: the holders of a model's code."""

from __future__ import annotations

from typing import Any

from transformers.utils.generic import GeneralInterface


def value_in(holder: Any, key: str, default: Any = None) -> Any:
    """The value of a name in a class (without its bases), in a module's globals or in a registry."""
    if isinstance(holder, type):
        return vars(holder).get(key, default)
    if isinstance(holder, GeneralInterface):
        return holder._local_mapping.get(key, type(holder)._global_mapping.get(key, default))
    return dict.get(holder, key, default)


def entries_of(registry: Any) -> list[tuple[Any, Any]]:
    """The (key, value) entries of a registry or a dictionary, without calling overridden methods.

    A registry is a `GeneralInterface` of transformers, with entries of its object and of its class. If both have a key,
    the object's entry counts.
    """
    if isinstance(registry, GeneralInterface):
        return [*{**type(registry)._global_mapping, **registry._local_mapping}.items()]
    return [*dict.items(registry)]


def size_of(holder: Any) -> int:
    """Number of names in a class, in a module's globals or in a registry."""
    if isinstance(holder, type):
        return len(vars(holder))
    return len(entries_of(holder)) if isinstance(holder, GeneralInterface) else dict.__len__(holder)
