"""Modules of a parallelized model that compute in the caller's process too: activations and others without weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.remote_module import FIXED, may_be_read
from parallelformers_ng.model.stand_in import stand_in, whole_class

_homes: weakref.WeakKeyDictionary[Any, list[tuple[weakref.ref[Calls], str]]] = weakref.WeakKeyDictionary()
"""Module → its path in each parallelized model that has it; some programs share an activation between models."""


def computes_here(module: nn.Module) -> bool:
    """Return whether a module does here what it does on a rank: neither it nor what is in it has weights, or does as
    its mode says."""
    for part in module.modules():
        code = getattr(type(part).forward, "__code__", None)
        if part._parameters or part._buffers or (code is not None and "training" in code.co_names):
            return False
    return True


class PlainPart(nn.Module):
    """Mixed in before a module's own class while a model that has it is parallelized: what is set on the module reaches
    the workers."""

    def __setattr__(self, name: str, value: Any) -> None:
        homes = _homes.get(self, [])
        if name in FIXED or isinstance(value, (nn.Module, nn.Parameter)):
            raise ParallelError(
                f"{homes[0][1] if homes else type(self).__name__} belongs to a parallelized model, which rules out"
                f" setting {name}: the workers have a copy of it. Call deparallelize() first"
            )
        if name != "training" and may_be_read(self, name, value):
            for home, path in homes:
                if (calls := home()) is not None:
                    calls.set_attribute(path, name, value)
        super().__setattr__(name, value)


class PlainParts:
    """The plain parts of one parallelized model.

    Args:
        calls: calls of the model.
        parts: path and module of each.
    """

    def __init__(self, calls: Calls, parts: Sequence[tuple[str, nn.Module]]) -> None:
        self._calls = weakref.ref(calls)
        self._parts = [part for _, part in parts]
        for path, part in parts:
            if not isinstance(part, PlainPart):
                cls: Any = type(part)
                part.__class__ = _plain_class(cls)
            _homes.setdefault(part, []).append((self._calls, path))

    def leave(self) -> None:
        """Make them ordinary modules again, if no other parallelized model has them."""
        for part in self._parts:
            _homes[part] = [home for home in _homes[part] if home[0] != self._calls]
            if not _homes[part]:
                del _homes[part]
                object.__setattr__(part, "__class__", whole_class(type(part)))


@functools.cache
def _plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    return stand_in(PlainPart, cls, {})
