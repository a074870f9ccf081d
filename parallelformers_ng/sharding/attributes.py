"""Sets attributes of a rank's modules, and of the configurations that the modules read."""

from __future__ import annotations

import copy
import enum
import pickle
from operator import attrgetter
from typing import Any

from torch import nn

_COPY_OF = "_parallelformers_ng_copy_of"


class Removed(enum.Enum):
    """The value of an attribute that the caller deleted."""

    REMOVED = enum.auto()


REMOVED = Removed.REMOVED


def put_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object, or delete it if `value` is REMOVED and the object has it."""
    if value is not REMOVED:
        setattr(owner, name, value)
    elif name in getattr(owner, "__dict__", {}):
        delattr(owner, name)


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute by its dotted path `name` from a module. A configuration on the path is copied first, so that
    other modules keep the original.

    Raises:
        AttributeError: an object on the path does not exist.
    """
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
    """Set an attribute of a configuration by its dotted path `name` from the model, also in copies by `set_attribute`.
    With REMOVED as value, delete the attribute.

    A copy whose value differed from the configuration's value keeps its value.

    Raises:
        AttributeError: an object on the path does not exist.
    """
    owner, _, last = name.rpartition(".")
    target = attrgetter(owner)(model)
    whole = getattr(target, _COPY_OF, target)
    before = getattr(whole, last, None)
    for config in (whole, *(module.__dict__.get("config") for module in model.modules())):
        if (config is whole or getattr(config, _COPY_OF, None) is whole) and are_equal(
            getattr(config, last, None), before
        ):
            put_attribute(config, last, value)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, also if they contain tensors or arrays, whose comparison is no truth value."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return pickle.dumps(one) == pickle.dumps(other)
