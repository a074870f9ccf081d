"""Fewer layers for a small copy of a configuration, and whatever in it counts or lists them."""

from __future__ import annotations

import re
from typing import Any

from parallelformers_ng.sharding.settings import own_settings, put, setting

_LAYERS = re.compile(r"(^|_)(layers|layer|depth|blocks)$")
_NOT_LAYERS = re.compile(
    r"vision_feature|select|feature_layer|which|encoder_layer_id|return|freeze|first|last|max_window|shared_layers"
)
_LAYER_NUMBERS = re.compile(
    r"(layer|block|attn|attention|out|visual|deepstack|moe|dense).*_(indices|indexes|idx|ids|idxs)$"
)
_OUTPUTS = re.compile(r"out_(indices|layers)$")


def shrink_layers(config: Any) -> None:
    """Two layers, or as many as show every kind of layer; lists with an item per layer follow."""
    for name, count in list(own_settings(config)):
        if not _LAYERS.search(name) or _NOT_LAYERS.search(name):
            continue
        if name in ("depths", "layers", "num_layers_per_stage") and isinstance(count, (list, tuple)):
            continue
        if not isinstance(count, int) or count <= 2:
            continue
        patterns = [v for _, v in own_settings(config) if isinstance(v, (list, tuple)) and len(v) == count]
        kept = 2
        for pattern in patterns:
            if all(isinstance(item, (str, int)) for item in pattern):
                kinds = set(pattern)
                first = [list(pattern).index(kind) for kind in kinds]
                if len(kinds) <= 6:
                    kept = max(kept, max(first) + 1)
                if "hybrid" in kinds and pattern.count("hybrid") > 1:  # these share weights with one another
                    kept = max(kept, pattern.index("hybrid", first[list(kinds).index("hybrid")] + 1) + 1)
        for period in (
            "full_attention_interval",
            "attn_layer_period",
            "sliding_window_pattern",
            "global_attn_every_n_layers",
        ):
            if isinstance(every := setting(config, period), int):
                kept = max(kept, every)
        first_dense = setting(config, "first_k_dense_replace")
        if isinstance(first_dense, int) and first_dense:
            put(config, "first_k_dense_replace", 1)
        stages = _stages(config, count)
        shared = setting(config, "num_kv_shared_layers") or 0  # the last ones take keys and values from those before
        if 0 < shared < count:
            kept *= 2
        outs = [
            key for key, numbers in own_settings(config)
            if _OUTPUTS.search(key) and isinstance(numbers, (list, tuple)) and all(type(n) is int for n in numbers)
        ]  # fmt: skip
        wanted = [len(stages), *(len(setting(config, key)) for key in outs)]
        kept = min(max(kept, *wanted), count)
        put(config, name, kept)
        if shared:
            put(config, "num_kv_shared_layers", kept // 2 if shared < count else kept)
        if stages:
            put(config, "stage_names", config.stage_names[: kept + 1])
            put(config, "_out_indices", list(range(kept + 1 - len(stages), kept + 1)))
            put(config, "_out_features", config.stage_names[-len(stages) :])
        for other, value in list(own_settings(config)):
            if isinstance(value, (list, tuple)) and len(value) == count and count > 3:
                put(config, other, type(value)(value[:kept]))
            elif other in outs:  # as many as before, of the layers there are
                put(config, other, type(value)(range(kept - len(value), kept)))
            elif _LAYER_NUMBERS.search(other) and isinstance(value, (list, tuple)) and value:
                inside = [item for item in value if type(item) is not int or -kept <= item < kept] or [kept - 1]
                put(config, other, type(value)(inside))
    for name in ("depths", "layers_per_stage"):
        if isinstance(depths := setting(config, name), (list, tuple)):
            put(config, name, type(depths)(min(2, depth) if isinstance(depth, int) else depth for depth in depths))


def _stages(config: Any, count: int) -> list[int]:
    """The layers, counted from 1, whose states a backbone of `count` equal layers gives; none for others."""
    indices, names = vars(config).get("_out_indices"), vars(config).get("stage_names")
    if not indices or not names or len(names) != count + 1 or "depths" in vars(config):
        return []
    return [index for index in indices if index % len(names)]
