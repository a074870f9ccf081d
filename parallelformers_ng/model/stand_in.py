"""Makes the classes that a parallelized model's modules have instead of their original classes."""

from __future__ import annotations

import copyreg
import operator
from typing import Any

from torch import nn


class _StandIn(type):
    """Metaclass of the replacement classes: calling such a class, or `isinstance` with it, uses the original class."""

    _whole_class: type[nn.Module]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._whole_class(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._whole_class)


def stand_in(mixin: type, cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Return a subclass of `cls` with the same name and module, so that saved and printed names are the original's.

    Args:
        mixin: class whose methods come before the methods of `cls`.
        cls: the original class.
        members: name → further method or attribute.
    """
    kind = _StandIn if type(cls) is type else type("_StandIn", (_StandIn, type(cls)), {})
    copyreg.pickle(kind, _as_whole)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    combined = kind(cls.__name__, (mixin, cls), names | members)
    combined._whole_class = cls
    return combined


def whole_class(cls: Any) -> type[nn.Module]:
    """Return the original class of a class that `stand_in` or `around.surround` made."""
    return cls._whole_class


def _as_whole(cls: _StandIn) -> Any:
    """Reduce a replacement class for pickle: unpickling returns the original class."""
    return operator.itemgetter(0), ((cls._whole_class,),)
