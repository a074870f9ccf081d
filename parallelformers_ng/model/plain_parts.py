"""Lets modules without weights, such as activations, compute in the caller's process while a model is parallelized."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.remote_module import FIXED, may_be_read
from parallelformers_ng.model.stand_in import stand_in, whole_class

_homes: weakref.WeakKeyDictionary[Any, list[tuple[weakref.ref[Calls], str]]] = weakref.WeakKeyDictionary()
"""Module → (calls, path) in each parallelized model with the module; models may share an activation module."""


def computes_here(module: nn.Module) -> bool:
    """Return whether a module computes the same here as on a rank: the module and its submodules have no weights or
    buffers, and do not read `training` in `forward`."""
    for part in module.modules():
        code = getattr(type(part).forward, "__code__", None)
        if part._parameters or part._buffers or (code is not None and "training" in code.co_names):
            return False
    return True


class PlainPart(nn.Module):
    """Mixin that comes before the class of a module without weights while its model is parallelized.

    Attributes that the model's code may read, except `training`, are also set on the workers; see `may_be_read`.
    Setting a module, a weight or an attribute of `FIXED` raises ParallelError.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        homes = _homes.get(self, [])
        if name in FIXED or isinstance(value, (nn.Module, nn.Parameter)):
            raise ParallelError(
                f"{homes[0][1] if homes else type(self).__name__} belongs to a parallelized model and does"
                f" not support setting {name}: the workers have a copy of the module. Call deparallelize() first"
            )
        if name != "training" and may_be_read(self, name, value):
            for home, path in homes:
                if (calls := home()) is not None:
                    calls.set_attribute(path, name, value)
        super().__setattr__(name, value)


def enter_plain(part: nn.Module, calls: Calls, path: str) -> None:
    """Make a module a `PlainPart`, in place.

    Args:
        part: the module.
        calls: calls of the model.
        path: dotted path of the module in the model.
    """
    if not isinstance(part, PlainPart):
        cls: Any = type(part)
        part.__class__ = _plain_class(cls)
    _homes.setdefault(part, []).append((weakref.ref(calls), path))


def leave_plain(part: nn.Module, calls: Calls) -> None:
    """Undo `enter_plain`; the module stays a `PlainPart` if another parallelized model also has the module."""
    _homes[part] = [home for home in _homes[part] if home[0]() is not calls]
    if not _homes[part]:
        del _homes[part]
        object.__setattr__(part, "__class__", whole_class(type(part)))


@functools.cache
def _plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    return stand_in(PlainPart, cls, {})
