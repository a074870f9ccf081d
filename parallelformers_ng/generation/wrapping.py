"""Replaces methods and functions of torch and transformers in the process of a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a function of a class or module by `around(function)`, unless `around` has already replaced it."""
    usual = getattr(owner, name)
    if getattr(usual, "_made_by", None) is not around:
        wrapped: Any = functools.update_wrapper(around(usual), usual)
        wrapped._made_by = around
        setattr(owner, name, wrapped)
