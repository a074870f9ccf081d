"""Makes a configuration small without knowing what its settings mean: a number is halved where the class can be built
from what that gives, and weighs less."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig

from parallelformers_ng.sharding.settings import own_settings, parts_of, put

_KEPT = re.compile(r"head|vocab|token|_id$|_ids$")
"""Counts of heads are what a proof is about, and vocabularies go with the ids in them."""
_GAIN = 0.98
"""A step must leave at most this share of the weights; a smaller one is not worth another proportion."""


def shrink_by_trial(
    config: PreTrainedConfig, weigh: Callable[[PreTrainedConfig], int | None], enough: int
) -> PreTrainedConfig | None:
    """A small copy of `config`, or None where it cannot be made as small.

    Numbers that are equal are halved together, and all numbers of a list, so that widths that agree go on agreeing.

    Args:
        config: a configuration, small or not.
        weigh: how many parameters its model has; None where the class refuses it.
        enough: parameters.
    """
    small = copy.deepcopy(config)
    weight = weigh(small)
    progress = True
    while weight is not None and weight > enough and progress:
        progress = False
        for value in list(_values(small)):
            tried = _halved(small, value)
            lighter = weigh(tried)
            if lighter is not None and lighter <= _GAIN * weight:
                small, weight, progress = tried, lighter, True
                if weight <= enough:
                    break
    return small if weight is not None and weight <= enough else None


def _values(config: PreTrainedConfig) -> Iterator[Any]:
    """Every number and list of numbers that can be halved, each once, largest first."""
    found = {_frozen(value) for part in parts_of(config) for name, value in own_settings(part) if _is_open(name, value)}
    yield from sorted(found, key=lambda value: max(value) if isinstance(value, tuple) else value, reverse=True)


def _is_open(name: str, value: Any) -> bool:
    numbers = value if isinstance(value, (list, tuple)) else [value]
    counts = bool(numbers) and all(type(number) is int and number > 0 for number in numbers)
    return counts and max(numbers) > 1 and not _KEPT.search(name)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _halved(config: PreTrainedConfig, value: Any) -> PreTrainedConfig:
    tried = copy.deepcopy(config)
    for part in parts_of(tried):
        for name, held in list(own_settings(part)):
            if _is_open(name, held) and _frozen(held) == value:
                half = [max(1, number // 2) for number in held] if isinstance(held, (list, tuple)) else held // 2
                put(part, name, type(held)(half))
    return tried
