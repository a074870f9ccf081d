"""Decides which attributes that the caller sets or deletes on a module the workers need."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from parallelformers_ng.live_code.stock import is_code_of_program
from parallelformers_ng.sharding.active_adapters import SWITCHES
from parallelformers_ng.sharding.attributes import REMOVED

_ABSENT = object()
AGAIN = "Call deparallelize(), then parallelize() again"
FROZEN = "the workers run the code of the model as it was when it was parallelized"


def is_frozen_code(
    module: nn.Module, name: str, value: Any, names: Callable[[str], bool], here: Collection[str] = ()
) -> bool:
    """Whether setting or deleting an attribute would change the user's code that the ranks may run.

    Methods of `nn.Module` and `generate` run only in the caller's process, unless the user's code contains their names.
    """
    before = vars(module).get(name, _ABSENT)
    value = before if value is REMOVED else value if before is not value else None
    if not callable(value) or isinstance(value, (type, nn.Module)):
        return False
    if not (is_code_of_program(value) or isinstance(getattr(value, "__self__", None), nn.Module)):
        return False
    if hasattr(nn.Module, name) or name in ("generate", "save_pretrained"):
        return names(name)
    on_ranks = name in vars(module) and name not in here
    return on_ranks or callable(getattr(type(module), name, None)) or names(name)


def may_be_read(module: nn.Module, name: str, value: Any, names: Callable[[str], bool]) -> bool:
    """Whether the model's code may read an attribute that is about to be set, so that workers need the value.

    The workers need the value if the user's code contains the name of the attribute, or if the module already has
    the attribute with another value. The workers also need the value if the class has the attribute, and that attribute
    is not callable. Otherwise, a private attribute is sent only if the module itself has the attribute and the value is
    a number, string or data type: libraries use private attributes for bookkeeping. Attributes that select peft's
    active adapters are not sent, because each call sends the active adapters.
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
