"""Decides which attributes that the caller sets or deletes on a module the workers need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelformers_ng.sharding.active_adapters import SWITCHES
from parallelformers_ng.sharding.attributes import REMOVED

_ABSENT = object()


def may_be_read(module: nn.Module, name: str, value: Any, names: Callable[[str], bool]) -> bool:
    """Return whether the model's code may read an attribute that is about to be set, so that workers need the value.

    The workers need the value if the program's code contains the name of the attribute, or if the module already has
    the attribute with another value. The workers also need the value if the class has the attribute, and that attribute
    is not callable. Otherwise, a private attribute is sent only if the module itself has the attribute and the value is
    a number, string or data type: libraries use private attributes for bookkeeping. Attributes that select peft's
    active adapters are not sent, because each call sends the active adapters.

    Args:
        module: the module.
        name: name of the attribute.
        value: new value of the attribute, or REMOVED if the attribute is deleted.
        names: function that returns whether the program's code contains a name.
    """
    own = vars(module)
    if own.get(name, _ABSENT) is value or name in SWITCHES:
        return False
    if name.startswith("_"):
        is_sent = name in own and (value is REMOVED or isinstance(value, (bool, int, float, str, torch.dtype)))
    else:
        of_class = getattr(type(module), name, None)
        is_sent = name in own or (of_class is not None and not callable(of_class))
    return is_sent or names(name)
