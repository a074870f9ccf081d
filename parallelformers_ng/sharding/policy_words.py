"""Defines the terms that rules use: units of widths, and parts of packed projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Unit of a layer's width: query heads, key/value heads or plain columns. "" means "query" beneath a module with a
# `Heads` rule and "column" elsewhere.
Unit = Literal["", "query", "key", "column"]


@dataclass(frozen=True)
class Part:
    """One of several projections packed in one layer whose heads differ in width, as in a state-space mixer.

    Args:
        unit: kind of the heads in this part, "query" or "key".
        width: columns of one head: a number, or the name of an attribute of the module with the `Heads` rule.
    """

    unit: Unit
    width: int | str
