"""Makes a configuration small and keeps its shape: head counts, layer pattern, and every ratio between widths.

All widths are multiplied by one power of two. Where it divides them, sums and products between them (a fused q|k|v, a
projection into another tower's width, `heads · head_dim`) hold afterwards as before; head counts are left alone.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from parallelformers_ng.sharding.structure import setting

_WIDTH = re.compile(
    r"(^|_)(dim|dims|size|sizes|width|widths|channel|channels|embd|inner|model|ff|ffn|rank|filters|features|hidden"
    r"|embed|ffn_dim|mrope_section)$|^(n_embd|n_inner|d_model|d_ff|d_kv|dim|channels|hidden_size_global)$"
)
_NOT_WIDTH = re.compile(
    r"vocab|image|patch|window|kernel|stride|chunk|token|position|crop|batch|frame|mel|segment|grid|resolution|tubelet"
    r"|num_channels|codebook_size|bottleneck_stride|buckets|cache|block_size|spatial|temporal|memory_size|pool|merge"
    r"|max_size|depth_|base_channels|input_size|cardinality|num_input|^in_chan|box|clamp|ngram_size|neighborhood|conv_size|_dconv"
)
_LAYERS = re.compile(r"(^|_)(layers|layer|depth|blocks)$")
_NOT_LAYERS = re.compile(
    r"vision_feature|select|feature_layer|which|encoder_layer_id|return|freeze|first|last|max_window"
)
_LAYER_NUMBERS = re.compile(
    r"(layer|block|attn|attention|out|visual|deepstack|moe|dense).*_(indices|indexes|idx|ids|idxs)$"
)
_POSITIONS = re.compile(r"^(max_position_embeddings|n_positions|max_.*positions|max_seq_len(gth)?|seq_length|n_ctx)$")
_WINDOW = re.compile(r"^(sliding_window|attention_window|local_window|attention_chunk_size|(mamba_)?chunk_size)$")
_BLOCK = re.compile(r"^(window_size|block_size)$")
_EXPERTS = re.compile(r"^(?!.*(shared|per_tok|topk|top_k|selected|used)).*experts$")
_MAIN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "emb_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_HEAD_WIDTHS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_headdim", "mamba_d_head", "d_kv")
_HEAD_COUNT = re.compile(r"(^|_)(heads|n_head|nhead|num_head)$")
_HEAD_WIDTH = re.compile(r"head_?dim|d_head|^d_kv$|head_size|mrope_section")
_TINY = 128
_SCALED_FROM = 16
"""Widths below are left alone."""
_FILTERS = 4
VOCABULARY = 131


@dataclass(frozen=True)
class Shrinking:
    """What to spare, and what not.

    Attributes:
        spare: powers of two by which widths are kept larger than they could be, for architectures with constraints of
            their own (norms over 32 groups, say).
        keep_vocabulary: leave vocabularies alone, for those whose ids are computed from one another.
        keep_images: leave the sizes of images alone, for those whose number of patches is written down elsewhere.
        heads: powers of two by which all head counts are made smaller, where they are all divisible by them: for models
            with so many heads that they cannot be made tiny otherwise.
        filters: make the first width of a convolutional codec small, too: it doubles from stage to stage.
    """

    spare: int = 0
    keep_vocabulary: bool = False
    keep_images: bool = False
    heads: int = 0
    filters: bool = False


def shrink(config: PreTrainedConfig, shrinking: Shrinking = Shrinking()) -> PreTrainedConfig:
    """A small copy of `config`; one that is small already comes back as it is."""
    small = copy.deepcopy(config)
    parts = list(_parts(small))
    factor = min(1.0, _width_factor(parts) * 2**shrinking.spare)
    fewer = _fewer_heads(parts, shrinking.heads) if factor < 1 else 1.0
    ids: dict[int, int] = {}
    for part in parts:
        _shrink_layers(part)
        _shrink_experts(part)
        if not shrinking.keep_images:
            _shrink_images(part)
        if shrinking.filters and isinstance(count := setting(part, "num_filters"), int):
            _set(part, "num_filters", min(count, _FILTERS))
        mains = {setting(part, main) for main in _MAIN}
        for name, value in list(_own(part)):
            if factor < 1 and _is_width(name, value, mains):
                _set(part, name, _scale(value, factor if _HEAD_WIDTH.search(name) else factor * fewer))
            elif fewer < 1 and _HEAD_COUNT.search(name) and isinstance(value, int):
                _set(part, name, max(1, int(value * fewer)))
            elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
                _set(part, name, _scale_sections(part, value, factor))
            elif _POSITIONS.match(name) and isinstance(value, int) and value > 256:
                _set(part, name, 256)
            elif _WINDOW.match(name) and isinstance(value, int) and value > 8:
                _set(part, name, 4)  # shorter than what the proof decodes
            elif _BLOCK.match(name) and isinstance(value, int) and value > 64:
                # Where nothing else counts positions, it does (Bark).
                _set(part, name, 4 if any(_POSITIONS.match(other) for other in vars(part)) else 64)
    if not shrinking.keep_vocabulary:
        for part in parts:
            _shrink_vocabulary(part, ids)
    return small


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and all those inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _own(config: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(config).items():
        if name.startswith("_") or isinstance(value, (PreTrainedConfig, bool)):
            continue
        if isinstance(value, (int, list, tuple, dict)):
            yield name, value


def _set(config: Any, name: str, value: Any) -> None:
    """Also where a configuration refuses to have an attribute changed later."""
    config.__dict__[name] = value


def _is_width(name: str, value: Any, mains: set[Any]) -> bool:
    """Whether an attribute is a width, or counts the groups of a convolution that has one for each of its channels."""
    if _NOT_WIDTH.search(name):
        return False
    if name.endswith("_groups"):
        return isinstance(value, int) and value > 64 and value in mains
    return bool(_WIDTH.search(name) or _HEAD_WIDTH.search(name))


def _width_factor(parts: list[Any]) -> float:
    """The smallest power of two that leaves heads at least 8 wide and widths whole."""
    mains, heads_dims = [], []
    for part in parts:
        width = next((value for name in _MAIN if isinstance(value := setting(part, name), int)), None)
        heads = next((value for name in _HEADS if isinstance(value := setting(part, name), int)), None)
        head_dim = setting(part, "head_dim")
        if width and width > 1:
            mains.append(width)
        mains += _stage_widths(part) if not width else []
        if isinstance(head_dim, int):
            heads_dims.append(head_dim)
        elif width and heads and width % heads == 0:
            heads_dims.append(width // heads)
        heads_dims += [value for name in _HEAD_WIDTHS if isinstance(value := setting(part, name), int)]
    if not mains or max(mains) <= _TINY:
        return 1.0
    factor = 1.0
    while factor > 1 / 64 and max(mains) * factor > 48:
        smaller = factor / 2
        if any(value * smaller < 8 or value * smaller % 2 for value in heads_dims if value >= _SCALED_FROM):
            break
        if any(value * smaller % 1 for value in mains) or min(mains) * smaller < 8:
            break
        factor = smaller
    return factor


def _stage_widths(part: Any) -> list[int]:
    """The widths of a model in stages that names no other, unless stages have heads of their own."""
    widths = setting(part, "hidden_sizes")
    if not isinstance(widths, (list, tuple)) or any(_HEAD_COUNT.search(name) for name, _ in _own(part)):
        return []
    return [width for width in widths if isinstance(width, int)]


def _fewer_heads(parts: list[Any], most: int) -> float:
    """The smallest power of two, down to `2 ** -most`, that leaves all head counts whole."""
    counts = [
        value for part in parts for name, value in _own(part)
        if _HEAD_COUNT.search(name) and isinstance(value, int) and value > 1
    ]  # fmt: skip
    factor = 1.0
    while factor > 2**-most and all(count * factor / 2 >= 2 and count * factor / 2 % 1 == 0 for count in counts):
        factor /= 2
    return factor


def _scale(value: Any, factor: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple, dict)):
        return value
    if isinstance(value, dict):
        return {key: _scale(item, factor) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_scale(item, factor) for item in value)
    if value < _SCALED_FROM:
        return value
    scaled = value * factor
    return int(scaled) if scaled == int(scaled) and scaled >= 4 else max(4, math.ceil(scaled / 4) * 4)


def _scale_sections(config: Any, rope: dict[str, Any], factor: float) -> dict[str, Any]:
    """The sections of a head that rotate by time, height and width still fill half a head.

    Some modelling code has a default of its own, for heads 128 wide.
    """
    sees = re.search(r"vl|omni|4v|_5|ocr|ernie", str(getattr(config, "model_type", "")))
    sections = rope.get("mrope_section") or ([16, 24, 24] if sees else None)
    if not sections or factor == 1:
        return rope
    scaled = [int(section * factor) for section in sections]
    scaled[0] += int(sum(sections) * factor) - sum(scaled)
    return {**rope, "mrope_section": scaled}


def _shrink_layers(config: Any) -> None:
    """Two layers, or as many as show every kind of layer; lists with an item per layer follow."""
    for name, count in list(_own(config)):
        if not _LAYERS.search(name) or _NOT_LAYERS.search(name):
            continue
        if name in ("depths", "layers", "num_layers_per_stage") and isinstance(count, (list, tuple)):
            continue
        if not isinstance(count, int) or count <= 2:
            continue
        patterns = [v for _, v in _own(config) if isinstance(v, (list, tuple)) and len(v) == count]
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
            _set(config, "first_k_dense_replace", 1)
        stages = _stages(config, count)
        kept = min(max(kept, len(stages)), count)
        _set(config, name, kept)
        if stages:
            _set(config, "stage_names", config.stage_names[: kept + 1])
            _set(config, "_out_indices", list(range(kept + 1 - len(stages), kept + 1)))
            _set(config, "_out_features", config.stage_names[-len(stages) :])
        for other, value in list(_own(config)):
            if isinstance(value, (list, tuple)) and len(value) == count and count > 3:
                _set(config, other, type(value)(value[:kept]))
            elif _LAYER_NUMBERS.search(other) and isinstance(value, (list, tuple)) and value:
                inside = [item for item in value if type(item) is not int or -kept <= item < kept] or [kept - 1]
                _set(config, other, type(value)(inside))
    for name in ("depths", "layers_per_stage"):
        if isinstance(depths := setting(config, name), (list, tuple)):
            _set(config, name, type(depths)(min(2, depth) if isinstance(depth, int) else depth for depth in depths))


def _stages(config: Any, count: int) -> list[int]:
    """The layers, counted from 1, whose states a backbone of `count` equal layers gives; none for others."""
    indices, names = vars(config).get("_out_indices"), vars(config).get("stage_names")
    if not indices or not names or len(names) != count + 1 or "depths" in vars(config):
        return []
    return [index for index in indices if index % len(names)]


def _shrink_images(config: Any) -> None:
    """Four patches a side, or 64 pixels where there are no patches of one size."""
    patch = setting(config, "patch_size")
    side = 4 * patch if isinstance(patch, int) and patch >= 8 else 64
    for name in ("image_size", "img_size"):
        size = setting(config, name)
        if isinstance(size, int) and size > side:
            _set(config, name, side)
        elif isinstance(size, (list, tuple)) and all(isinstance(s, int) and s > side for s in size):
            _set(config, name, type(size)(side for _ in size))
    limits = {"num_frames": 4, "max_source_positions": 40, "max_length": 128, "num_queries": 20}
    for name, most in limits.items():
        count = setting(config, name)
        if isinstance(count, int) and count > most:
            _set(config, name, most)


def _shrink_experts(config: Any) -> None:
    for name, count in list(_own(config)):
        if _EXPERTS.match(name) and isinstance(count, int) and count > 8:
            _set(config, name, 8)
            for groups, most in (("n_group", 2), ("topk_group", 1), ("num_experts_per_tok", 2), ("moe_topk", 2)):
                if isinstance(value := setting(config, groups), int):
                    _set(config, groups, min(value, most))


def _shrink_vocabulary(config: Any, ids: dict[int, int]) -> None:
    shrunk = False
    for name, size in list(_own(config)):
        counts = "vocab_size" in name or name.endswith("_vocab")
        if counts and "type_" not in name and isinstance(size, int) and size > 2 * VOCABULARY:
            _set(config, name, VOCABULARY)
            shrunk = True
    for name, value in list(_own(config)):
        if re.search(r"(token_id|token_index|token_ids|_id|_ids)$", name):
            _set(config, name, _small_id(value, ids))
    if shrunk and isinstance(setting(config, "pad_token_id"), int):
        _set(config, "pad_token_id", min(config.pad_token_id, VOCABULARY - 1))


def _small_id(value: Any, ids: dict[int, int]) -> Any:
    """Ids past the small vocabulary get others below its end, equal ones the same."""
    if isinstance(value, (list, tuple)):
        return type(value)(_small_id(item, ids) for item in value)
    if isinstance(value, bool) or not isinstance(value, int) or value < VOCABULARY:
        return value
    return ids.setdefault(value, VOCABULARY - 2 - len(ids) % (VOCABULARY - 20))
