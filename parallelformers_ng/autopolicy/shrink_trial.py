"""Makes a configuration with unknown settings small: halves numbers if the smaller model can be built and run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig

from parallelformers_ng.autopolicy.settings import is_id, mapped, own_settings, parts_of, put

_WIDTH = 16  # smallest number that the first step takes for a width, and halves
# Largest share of the parameters that may remain after a step; a smaller gain is not worth changed proportions.
_GAIN = 0.98
# Parts of the names of settings that are not halved.
_KEPT = ("head", "vocab", "token", "sliding_window", "attention_chunk_size", "experts", "conv_states")


def shrink_by_trial(
    config: PreTrainedConfig,
    weigh: Callable[[PreTrainedConfig], int | None],
    enough: int,
    runs: Callable[[PreTrainedConfig], bool] = lambda tried: True,
) -> PreTrainedConfig | None:
    """Return a small copy of `config`; None if the copy cannot be made small enough.

    The first step halves all numbers that look like widths, so that sums and products of widths stay right. Later steps
    halve all settings with the same number, or with the same list of numbers, together.
    """
    small = copy.deepcopy(config)
    weight = weigh(small)
    progress = True
    while weight is not None and weight > enough and progress:
        progress = False
        for chosen, least in _choices(small):
            smaller = _halved(small, chosen, least)
            lighter = weigh(smaller)
            if lighter is not None and lighter <= _GAIN * weight and runs(smaller):
                small, weight, progress = smaller, lighter, True
                if weight <= enough:
                    break
    return small if weight is not None and weight <= enough else None


Chosen = Callable[[tuple[int, ...]], bool]


def _choices(config: PreTrainedConfig) -> list[tuple[Chosen, int]]:
    """Return the groups of settings to halve, each with the least number to halve, the largest numbers first."""
    settings_by_numbers = {_numbers(name, value) for part in parts_of(config) for name, value in own_settings(part)}
    values = sorted(filter(None, settings_by_numbers), key=max, reverse=True)
    return [(lambda numbers: max(numbers) >= _WIDTH, _WIDTH), *((value.__eq__, 2) for value in values)]


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    """Return the numbers of a setting, also from nested lists; empty if the setting must not be halved.

    Head counts stay because a proof must test the real head counts; vocabularies stay because settings hold token ids.
    Windows and expert counts are small already: masks of transformers do not fit windows of one token, and experts
    form groups.
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
    halved = copy.deepcopy(config)
    for part in parts_of(halved):
        for name, setting in list(own_settings(part)):
            numbers = _numbers(name, setting)
            if numbers and chosen(numbers):
                put(part, name, mapped(setting, lambda number: number // 2 if number >= least else number))
    return halved
