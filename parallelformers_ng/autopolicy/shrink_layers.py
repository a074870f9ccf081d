"""Fewer layers for a small copy of a configuration, and whatever in it counts or lists them."""

from __future__ import annotations

from typing import Any

from parallelformers_ng.autopolicy.config_numbers import Shapes
from parallelformers_ng.autopolicy.settings import own_settings, put, setting, stored_name

_LAYERS = ("layers", "layer", "depth", "blocks")
"""How the names of settings end that count layers."""
_SHARED = "num_kv_shared_layers"
"""How many of the last layers take keys and values from those before."""
_ONCE = "num_layers_per_stack"
"""Return the number of layers, even if the main setting counts a layer once for each time it runs."""
_PERIODS = ("full_attention_interval", "attn_layer_period", "sliding_window_pattern", "global_attn_every_n_layers")
_KINDS = 6
"""A list that names more is no list of kinds."""


def shrink_layers(config: Any, fewest: int, shapes: Shapes) -> None:
    """Return the fewest layers that show every kind in the configuration's lists; lists with an item per layer follow.

    Args:
        config: one part of a configuration.
        fewest: how many layers are left, at least.
        shapes: meaning of the numbers, seen on the model. Layers that share their weights are in no list of
            modules.
    """
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
            put(config, name, type(depths)(min(2, depth) if isinstance(depth, int) else depth for depth in depths))


def _shrink_count(config: Any, name: str, count: int, fewest: int, shapes: Shapes) -> None:
    """Make the `count` layers that an attribute counts as few as the rest of the configuration allows."""
    if isinstance(once := setting(config, _ONCE), int) and count > once:  # 128 and 16: 16 layers that run 8 times
        put(config, _ONCE, min(fewest, once))
        put(config, name, count // once * min(fewest, once))
        return
    stages, outputs = _stages(config, count), _output_lists(config)
    shared = setting(config, _SHARED) or 0
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
    first_dense = setting(config, "first_k_dense_replace")
    if isinstance(first_dense, int) and first_dense:
        put(config, "first_k_dense_replace", 1)
    _shorten_lists(config, count, kept, outputs, shapes)


def _sections(config: Any, main: str) -> list[str]:
    """Settings that say how many layers come first, next and last, that of the longest section last; none if no two
    or more add up to all layers."""
    others = {name: count for name, count in own_settings(config) if name != main and name.endswith(_LAYERS)}
    counts = {name: count for name, count in others.items() if isinstance(count, int) and count > 0}
    adding = len(counts) > 1 and sum(counts.values()) == setting(config, main)
    return sorted(counts, key=counts.__getitem__) if adding else []


def _layers_of_all_kinds(config: Any, count: int) -> int:
    """Return how many of the first layers show every kind that a list with an item per layer names; 0 without such a
    list."""
    needed = 0
    for _, pattern in own_settings(config):
        if not isinstance(pattern, (list, tuple)) or len(pattern) != count:
            continue
        if not all(isinstance(item, (str, int)) for item in pattern):
            continue
        kinds = set(pattern)
        if len(kinds) <= _KINDS:
            needed = max(needed, *(pattern.index(kind) + 1 for kind in kinds))
        if pattern.count("hybrid") > 1:  # these share weights with one another
            needed = max(needed, pattern.index("hybrid", pattern.index("hybrid") + 1) + 1)
    return needed


def _longest_period(config: Any, count: int) -> int:
    """Return the period after which kinds of layers repeat, 0 if unknown."""
    periods = [every for name in _PERIODS if isinstance(every := setting(config, name), int)]
    lists = [items for _, items in own_settings(config) if isinstance(items, (list, tuple))]
    lengths = [len(items) for items in lists if items and all(isinstance(item, str) for item in items)]
    return max([*periods, *(length for length in lengths if length < count)], default=0)  # shorter ones are repeated


def _output_lists(config: Any) -> list[str]:
    """Return names of the lists of layers whose outputs a backbone gives."""
    return [
        name for name, numbers in own_settings(config)
        if name.endswith("out_indices") and isinstance(numbers, (list, tuple)) and all(type(n) is int for n in numbers)
    ]  # fmt: skip


def _shorten_lists(config: Any, count: int, kept: int, outputs: list[str], shapes: Shapes) -> None:
    """Make lists with an item per layer, and lists of layers, fit the layers that are kept."""
    for name, value in list(own_settings(config)):
        if not isinstance(value, (list, tuple)):
            continue
        if len(value) == count and count > 3:
            put(config, name, type(value)(value[:kept]))
        elif name in outputs:  # as many as before, of the layers there are
            put(config, name, type(value)(range(kept - len(value), kept)))
        elif shapes.numbers_layers(value, count):
            put(config, name, type(value)([number for number in value if number < kept] or [kept - 1]))


def _stages(config: Any, count: int) -> list[int]:
    """Return the layers, counted from 1, whose states a backbone of `count` equal layers gives; none for others."""
    indices, names = vars(config).get("_out_indices"), vars(config).get("stage_names")
    if not indices or not names or len(names) != count + 1 or "depths" in vars(config):
        return []
    return [index for index in indices if index % len(names)]
