"""Attributes of a rank's modules that differ from those of the whole model's, and of the configurations they read."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

from torch import nn

_COPY_OF = "_parallelformers_ng_copy_of"


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set the dotted `name` beneath a module. A configuration on the way is copied first: others still read the
    whole."""
    owner: Any = module
    *path, last = name.split(".")
    for part in path:
        if part == "config":
            whole = getattr(owner, part)
            setattr(owner, part, copy.copy(whole))
            vars(getattr(owner, part)).setdefault(_COPY_OF, whole)
        owner = getattr(owner, part)
    setattr(owner, last, value)


def set_config(model: nn.Module, name: str, value: Any) -> None:
    """Change `name`, dotted from the model on, of a configuration, also in the copies that `set_attribute` made of it.

    A copy with another value was set on purpose, and stays.
    """
    owner, _, last = name.rpartition(".")
    target = attrgetter(owner)(model)
    whole = getattr(target, _COPY_OF, target)
    before = getattr(whole, last, None)
    for config in (whole, *(module.__dict__.get("config") for module in model.modules())):
        if (config is whole or getattr(config, _COPY_OF, None) is whole) and getattr(config, last, None) == before:
            setattr(config, last, value)
