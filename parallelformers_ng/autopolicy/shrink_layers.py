"""Reduces the number of layers in a small copy of a configuration, and shortens lists with an item for each layer."""

from __future__ import annotations

from typing import Any

from parallelformers_ng.autopolicy.config_numbers import Shapes
from parallelformers_ng.autopolicy.settings import limit, mapped, number, own_settings, put, setting, stored_name

_LAYERS = ("layers", "layer", "depth", "blocks")  # last parts of the names of settings that count layers
_SHARED = "num_kv_shared_layers"  # setting that counts the last layers that use keys and values of earlier layers
# Setting that counts the distinct layers, if the main setting counts how often layers run.
_ONCE = "num_layers_per_stack"
_PERIODS = ("full_attention_interval", "attn_layer_period", "sliding_window_pattern", "global_attn_every_n_layers")
_KINDS = 6  # most kinds of layers in a list; a list with more different items does not list kinds of layers


def shrink_layers(config: Any, fewest: int, shapes: Shapes) -> None:
    """Reduce a configuration in place to the fewest layers that include every kind of layer, at least `fewest`."""
    main = stored_name(config, "num_hidden_layers")
    sections = _sections(config, main)
    for name, count in list(own_settings(config)):
        if not isinstance(count, int) or count <= 2 or name in (_SHARED, *sections):
            continue
        if name == main or (name.endswith(_LAYERS) and count in shapes.lengths):
            _shrink_count(config, name, count, max(fewest, len(sections)) if name == main else fewest, shapes)
    for section in sections:
        put(config, section, setting(config, main) - len(sections) + 1 if section == sections[-1] else 1)
    for name in ("depths", "layers_per_stage"):
        if isinstance(depths := setting(config, name), (list, tuple)):
            put(config, name, mapped(depths, lambda depth: min(2, depth)))


def _shrink_count(config: Any, name: str, count: int, fewest: int, shapes: Shapes) -> None:
    """Reduce the attribute `name`, which counts `count` layers, as far as other settings allow."""
    if 0 < (once := number(config, _ONCE)) < count:  # count 128 and once 16: the model has 16 layers, each run 8 times
        put(config, _ONCE, min(fewest, once))
        put(config, name, count // once * min(fewest, once))
        return
    stages, outputs = _stages(config, count), _output_lists(config)
    shared = number(config, _SHARED)
    kept = max(fewest, _layers_of_all_kinds(config, count), _longest_period(config, count))
    if 0 < shared < count:
        kept *= 2
    kept = min(max(kept, len(stages), *(len(setting(config, key)) for key in outputs)), count)
    put(config, name, kept)
    if shared:
        put(config, _SHARED, kept // 2 if shared < count else kept)
    if stages:
        put(config, "stage_names", config.stage_names[: kept + 1])
        put(config, "_out_indices", list(range(kept + 1 - len(stages), kept + 1)))
        put(config, "_out_features", config.stage_names[-len(stages) :])
    limit(config, "first_k_dense_replace", 1)
    _shorten_lists(config, count, kept, outputs, shapes)


def _sections(config: Any, main: str) -> list[str]:
    """Return the names of settings each of which counts the layers of one section, the longest section last.

    Empty for fewer than two such settings, or if the sum of their values is not the number of all layers.
    """
    candidates = {name: count for name, count in own_settings(config) if name != main and name.endswith(_LAYERS)}
    counts = {name: count for name, count in candidates.items() if isinstance(count, int) and count > 0}
    adding = len(counts) > 1 and sum(counts.values()) == setting(config, main)
    return sorted(counts, key=counts.__getitem__) if adding else []


def _layers_of_all_kinds(config: Any, count: int) -> int:
    """Return the number of first layers that include every kind in lists with an item per layer; 0 without a list."""
    needed = 0
    for _, pattern in own_settings(config):
        is_list = isinstance(pattern, (list, tuple)) and len(pattern) == count
        if not is_list or not all(isinstance(item, (str, int)) for item in pattern):
            continue
        kinds = set(pattern)
        if len(kinds) <= _KINDS:
            needed = max(needed, *(pattern.index(kind) + 1 for kind in kinds))
        if pattern.count("hybrid") > 1:  # hybrid layers share weights, so two of them are needed
            needed = max(needed, pattern.index("hybrid", pattern.index("hybrid") + 1) + 1)
    return needed


def _longest_period(config: Any, count: int) -> int:
    """Return the number of layers after which the kinds of layers repeat; 0 if unknown."""
    periods = [number(config, name) for name in _PERIODS]
    lists = [items for _, items in own_settings(config) if isinstance(items, (list, tuple))]
    lengths = [len(items) for items in lists if items and all(isinstance(item, str) for item in items)]
    return max(*periods, *(length for length in lengths if length < count))  # a list shorter than `count` repeats


def _output_lists(config: Any) -> list[str]:
    return [
        name for name, numbers in own_settings(config)
        if name.endswith("out_indices") and isinstance(numbers, (list, tuple)) and all(type(n) is int for n in numbers)
    ]  # fmt: skip


def _shorten_lists(config: Any, count: int, kept: int, outputs: list[str], shapes: Shapes) -> None:
    """Shorten lists with an item for each layer, and lists of layer numbers, to the kept layers."""
    for name, value in list(own_settings(config)):
        if not isinstance(value, (list, tuple)):
            continue
        if len(value) == count and count > 3:
            put(config, name, type(value)(value[:kept]))
        elif name in outputs:  # the list keeps its length, and names the last layers
            put(config, name, type(value)(range(kept - len(value), kept)))
        elif shapes.numbers_layers(value, count):
            put(config, name, type(value)([number for number in value if number < kept] or [kept - 1]))


def _stages(config: Any, count: int) -> list[int]:
    """Return the layers, counted from 1, whose states a backbone of `count` equal layers returns.

    Empty for models of other kinds.
    """
    indices, names = vars(config).get("_out_indices"), vars(config).get("stage_names")
    if not indices or not names or len(names) != count + 1 or "depths" in vars(config):
        return []
    return [index for index in indices if index % len(names)]
