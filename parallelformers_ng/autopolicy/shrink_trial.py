"""Makes a configuration small without knowing what its settings mean: a number is halved where the model can be built
and run with what that gives, and weighs less."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig

from parallelformers_ng.autopolicy.settings import is_id, own_settings, parts_of, put

_WIDTH = 16
"""Numbers from here on are taken for widths at first."""
_GAIN = 0.98
"""A step must leave at most this share of the weights; a smaller one is not worth another proportion."""
_KEPT = ("head", "vocab", "token", "sliding_window", "attention_chunk_size", "experts", "conv_states")
"""What is in the names of settings that are not halved."""


def shrink_by_trial(
    config: PreTrainedConfig,
    weigh: Callable[[PreTrainedConfig], int | None],
    enough: int,
    runs: Callable[[PreTrainedConfig], bool] = lambda tried: True,
) -> PreTrainedConfig | None:
    """Return a small copy of `config`, or None if it cannot be made as small.

    Numbers that are equal are halved together, and all numbers of a list, so that widths that agree go on agreeing;
    before that, all numbers that look like widths, which also agree in sums and products.

    Args:
        config: a configuration, small or not.
        weigh: how many parameters its model has; None if the class refuses it.
        enough: parameters.
        runs: whether its model's forward takes it.
    """
    small = copy.deepcopy(config)
    weight = weigh(small)
    progress = True
    while weight is not None and weight > enough and progress:
        progress = False
        for chosen, least in _choices(small):
            tried = _halved(small, chosen, least)
            lighter = weigh(tried)
            if lighter is not None and lighter <= _GAIN * weight and runs(tried):
                small, weight, progress = tried, lighter, True
                if weight <= enough:
                    break
    return small if weight is not None and weight <= enough else None


Chosen = Callable[[tuple[int, ...]], bool]


def _choices(config: PreTrainedConfig) -> list[tuple[Chosen, int]]:
    """Yield the settings to halve, by their numbers, and the least number to halve; the most promising first."""
    settings_by_numbers = {_numbers(name, value) for part in parts_of(config) for name, value in own_settings(part)}
    values = sorted(filter(None, settings_by_numbers), key=max, reverse=True)
    return [(lambda numbers: max(numbers) >= _WIDTH, _WIDTH), *((value.__eq__, 2) for value in values)]


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    """Return the numbers that a setting has, also in lists within lists; none if none of them is to be halved.

    Counts of heads are what a proof is about, and vocabularies go with the ids in them. Windows and counts of experts
    are small already: transformers' own masks do not fit a window of one token, and experts are chosen from groups.
    """
    kept = is_id(name) or any(word in name for word in _KEPT)
    numbers = tuple(_flat(value))
    counts = all(number >= 0 for number in numbers) and max(numbers, default=1) > 1
    return numbers if counts and not kept else ()


def _flat(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _halved(config: PreTrainedConfig, chosen: Chosen, least: int) -> PreTrainedConfig:
    """Return a copy that halves the numbers of `chosen` settings that are at least `least`."""

    def half(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(half, value))
        return value // 2 if type(value) is int and value >= least else value

    tried = copy.deepcopy(config)
    for part in parts_of(tried):
        for name, setting in list(own_settings(part)):
            numbers = _numbers(name, setting)
            if numbers and chosen(numbers):
                put(part, name, half(setting))
    return tried
