"""Words of which rules are made: what widths are counted in, and the pieces of packed projections."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal, Self

from parallelformers_ng.errors import PolicyError, did_you_mean

Unit = Literal["", "query", "key", "column"]
"""What a layer's width is counted in: query heads, key/value heads or plain columns. "" is "query" beneath a module
with a `Heads` rule and "column" elsewhere."""


class Word:
    """Says which arguments a word takes if it is given others."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if args or kwargs:  # a copy is made without, and filled afterwards
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
    """One of several projections packed in one layer whose heads differ in width: the pieces of a state-space mixer.

    Args:
        unit: "query" or "key": which heads it is made of.
        width: columns of one of them, as a number or as the attribute that holds it, on the module with the `Heads`
            rule.
    """

    unit: Unit
    width: int | str
