"""Defines the terms that rules use: units of widths, and parts of packed projections."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal, Self

from parallelformers_ng.errors import PolicyError, did_you_mean

Unit = Literal["", "query", "key", "column"]
"""Unit of a layer's width: query heads, key/value heads or plain columns. "" means "query" beneath a module with a
`Heads` rule and "column" elsewhere."""


class Word:
    """Base of rules and parts. A wrong argument of the constructor raises a PolicyError with the allowed arguments."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if args or kwargs:  # `copy` calls this without arguments and sets attributes afterwards
            signature = inspect.signature(cls)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                strange = (name for name in kwargs if name not in signature.parameters)
                hint = did_you_mean(next(strange, ""), set(signature.parameters) - set(kwargs))
                takes = ", ".join(signature.parameters) or "nothing"
                raise PolicyError(f"{cls.__name__}: {error}{hint}; it takes {takes}") from None
        return super().__new__(cls)


@dataclass(frozen=True)
class Part(Word):
    """One of several projections packed in one layer whose heads differ in width, as in a state-space mixer.

    Args:
        unit: kind of the heads in this part, "query" or "key".
        width: columns of one head: a number, or the name of an attribute of the module with the `Heads` rule.
    """

    unit: Unit
    width: int | str
