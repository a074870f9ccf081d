"""Classes that stand in for those of a model's modules while it is parallelized."""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn


class _StandIn(type):
    """The type of the classes made here: an operation on such a class is done on the class that it stands for."""

    _whole_class: type[nn.Module]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._whole_class(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._whole_class)


def stand_in(mixin: type, cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Make a subclass of `cls` with its name and module, so that what it saves and prints names the original.

    Args:
        mixin: a class whose methods come before those of `cls`.
        members: further methods.
    """
    kind = _StandIn if type(cls) is type else type("_StandIn", (_StandIn, type(cls)), {})
    copyreg.pickle(kind, _as_whole)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    combined = kind(cls.__name__, (mixin, cls), names | members)
    combined._whole_class = cls
    return combined


def whole_class(cls: Any) -> type[nn.Module]:
    """Return the class that one made by `stand_in` stands for."""
    whole: type[nn.Module] = cls._whole_class
    return whole


def _as_whole(cls: _StandIn) -> Any:
    """Return how pickle takes such a class."""
    return _itself, (cls._whole_class,)


def _itself(cls: type) -> type:
    return cls
