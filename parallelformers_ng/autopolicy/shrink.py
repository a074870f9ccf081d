"""Makes a configuration small, but keeps head counts, the pattern of layers, and the ratios between widths.

All widths are multiplied by one power of two, at most 1. If all results are whole, sums and products of widths stay
right (a fused q|k|v, a projection to another tower's width, `heads · head_dim`). Head counts stay the same.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from parallelformers_ng.autopolicy.config_numbers import LONG, UNSEEN, Shapes
from parallelformers_ng.autopolicy.settings import is_id, limit, mapped, number, own_settings, parts_of, put, setting
from parallelformers_ng.autopolicy.shrink_layers import shrink_layers

_WIDTH = re.compile(
    r"_(dim|dims|size|sizes|width|channel|channels|inner|rank|filters|features)$|^(n_embd|d_model|d_ff|dim|channels)$"
    r"|^dim_|^hidden_size_global$|^d_kv$|head_?dim|d_head"
)
_NOT_WIDTH = re.compile(
    r"vocab|image|patch|window|kernel|stride|chunk|position|crop|frame|mel|grid|tubelet|num_channels|codebook_size|cache"
    r"|block_size|pool|merge|depth_|base_channels|input_size|num_input|^in_chan|ngram_size"
)
# Settings that limit or divide the tokens that a token attends to.
_WINDOW = re.compile(
    r"^((sliding_|attention_)?window_size|(sliding|attention)_window|(attention_|mamba_)?chunk_size|(index_)?block_size"
    r"|keep_window_size|local_attention(_window_len)?|index_topk(_blocks)?|indexer_budget)$"
)
# Setting of a mixture of experts → its largest value with 8 experts.
_BESIDE_EXPERTS = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_topk": 2, "zero_expert_num": 4}
_MAIN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "emb_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_HEAD_WIDTHS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_headdim", "mamba_d_head", "d_kv")
_TINY = 128
_SCALED_FROM = 16  # smallest width that is scaled
_LONG_WINDOW = 8  # longest window that stays; the proof decodes more tokens than this
_FILTERS = 4
_SECTIONS = [16, 24, 24]
VOCABULARY = 131


@dataclass(frozen=True)
class Shrinking:
    """Options of `shrink`."""

    # widths are 2 ** spare times the smallest possible widths, for architectures with further constraints, for example
    # norms over 32 groups
    spare: int = 0
    keep_vocabulary: bool = False  # keep vocabulary sizes, for models that compute ids from other ids
    keep_images: bool = False  # keep image sizes, for models that also state the number of patches elsewhere
    heads: int = 0  # most times that all head counts are halved, for models with too many heads for a small copy
    filters: bool = False  # also shrink the first width of a convolutional codec; later stages double it
    layers: int = 2  # least number of layers to keep
    shapes: Shapes = UNSEEN  # meaning of the configuration's numbers, read from the model


def shrink(config: PreTrainedConfig, shrinking: Shrinking = Shrinking()) -> PreTrainedConfig:
    """Return a small copy of `config`. If no main width is over 128, all widths and head counts stay the same.

    Unless `keep_vocabulary` is set, a vocabulary of more than 262 tokens becomes one of 131 tokens, and token ids from
    131 on become lower ids.
    """
    small, shapes = copy.deepcopy(config), shrinking.shapes
    parts = list(parts_of(small))
    factor = min(1.0, _width_factor(parts) * 2**shrinking.spare)
    fewer = _fewer_heads(parts, shrinking.heads) if factor < 1 else 1.0
    ids: dict[int, int] = {}
    for part in parts:
        shrink_layers(part, shrinking.layers, shapes)
        _shrink_experts(part)
        _shrink_named(part, shrinking.layers)
        if not shrinking.keep_images:
            _shrink_images(part)
        if shrinking.filters:
            limit(part, "num_filters", _FILTERS)
        mains = {number(part, main) for main in _MAIN}
        patches = setting(part, "patch_size") is not None and setting(part, "vocab_size") is None
        most = math.inf if patches or shapes.windows else _LONG_WINDOW
        by_coefficient = factor < 1 and _shrink_coefficients(part, factor)
        for name, value in list(own_settings(part)):
            if by_coefficient and name.endswith("_channels"):
                continue
            if _is_width(name, value, mains):
                if factor < 1:
                    by = factor if "head" in name or name == "d_kv" else factor * fewer
                    put(part, name, mapped(value, functools.partial(_scaled, factor=by)))
            elif fewer < 1 and _counts_heads(name) and isinstance(value, int):
                put(part, name, max(1, int(value * fewer)))
            elif _WINDOW.match(name) and isinstance(value, int) and value > most:
                put(part, name, 4)
            elif type(value) is int and value in shapes.tables and not is_id(name) and not _counts_tokens(name):
                put(part, name, LONG)  # the setting counts the rows of a long table, for example of positions
        for name in ("rope_parameters", "rope_scaling"):
            if factor < 1 and isinstance(rope := vars(part).get(name), dict):
                put(part, name, _scale_sections(part, rope))
    if not shrinking.keep_vocabulary:
        for part in parts:
            _shrink_vocabulary(part, ids)
    return small


def _is_width(name: str, value: Any, mains: set[Any]) -> bool:
    """Return whether an attribute is a width, or the number of groups of a convolution with one group per channel."""
    if _NOT_WIDTH.search(name):
        return False
    if name.endswith("_groups"):
        return isinstance(value, int) and value > 64 and value in mains
    return bool(_WIDTH.search(name))


def _shrink_coefficients(config: Any, factor: float) -> bool:
    """Shrink the width and depth coefficients of a configuration such as EfficientNet's.

    Return whether the configuration has such coefficients.
    """
    width, repeats = setting(config, "width_coefficient"), setting(config, "num_block_repeats")
    if width is None or not isinstance(repeats, (list, tuple)):
        return False
    put(config, "width_coefficient", width * factor)
    put(config, "depth_coefficient", 1.0)
    put(config, "num_block_repeats", [1] * len(repeats))
    return True


def _width_factor(parts: list[Any]) -> float:
    mains, head_dims, quotients = list[int](), list[int](), list[int]()
    for part in parts:
        width, heads = number(part, *_MAIN), number(part, *_HEADS)
        if width >= _SCALED_FROM:
            mains.append(width)
        elif not width:
            mains += _stage_widths(part)
        head_dims += [number(part, name) for name in ("head_dim", *_HEAD_WIDTHS)]
        if width and heads and width % heads == 0 and not isinstance(setting(part, "head_dim"), int):
            quotients.append(width // heads)
    if max(mains, default=0) <= _TINY:
        return 1.0
    scaled = quotients + [value for value in head_dims if value >= _SCALED_FROM]
    factor = 1.0
    while factor > 1 / 64 and max(mains) * factor > 48:
        smaller = factor / 2
        if any(value * smaller < 8 or value * smaller % 2 for value in scaled):
            break
        if any(value * smaller < 8 or value * smaller % 1 for value in mains):
            break
        factor = smaller
    return factor


def _counts_heads(name: str) -> bool:
    return name.endswith(("heads", "n_head")) and not name.startswith("index")


def _stage_widths(part: Any) -> list[int]:
    widths = setting(part, "hidden_sizes")
    if not isinstance(widths, (list, tuple)) or any(_counts_heads(name) for name, _ in own_settings(part)):
        return []
    return [width for width in widths if isinstance(width, int)]


def _fewer_heads(parts: list[Any], most: int) -> float:
    """Return the smallest power of two, at least `2 ** -most`, that keeps all head counts whole numbers above 1."""
    counts = [
        value for part in parts for name, value in own_settings(part)
        if _counts_heads(name) and isinstance(value, int) and value > 1
    ]  # fmt: skip
    factor = 1.0
    while factor > 2**-most and all(count * factor / 2 >= 2 and count * factor / 2 % 1 == 0 for count in counts):
        factor /= 2
    return factor


def _scaled(width: int, factor: float) -> int:
    if width < _SCALED_FROM:
        return width
    scaled = width * factor
    return int(scaled) if scaled == int(scaled) and scaled >= 4 else max(4, math.ceil(scaled / 4) * 4)


def _scale_sections(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE settings whose sections for time, height and width add up to half of the small head's rotated width.

    Equal sections stay equal. The result always has sections: some modelling code has defaults that do not fit a small
    head, and other code ignores the setting.
    """
    sections = rope.get("mrope_section") or _SECTIONS
    heads = number(config, *_HEADS)
    head = number(config, "head_dim") or (heads and number(config, "hidden_size") // heads)
    part = rope.get("partial_rotary_factor") or setting(config, "partial_rotary_factor") or 1.0
    half = int(head * part) // 2
    if half < len(sections):
        return rope
    scaled = [section * half // sum(sections) for section in sections]
    alone = next((i for i, section in enumerate(sections) if sections.count(section) == 1), 0)
    scaled[alone] += half - sum(scaled)
    return {**rope, "mrope_section": scaled}


def _shrink_images(config: Any) -> None:
    """Shrink images to four patches on each side, or to 64 pixels without a patch size; shrink frame counts, too."""
    patch = number(config, "patch_size")
    side = 4 * patch if patch >= 8 else 64
    for name in ("image_size", "img_size"):
        limit(config, name, side)
        size = setting(config, name)
        if isinstance(size, (list, tuple)) and all(isinstance(s, int) and s > side for s in size):
            put(config, name, type(size)(side for _ in size))
    for name, most in {"num_frames": 4, "max_source_positions": 40, "max_length": 128, "num_queries": 20}.items():
        limit(config, name, most)


def _shrink_named(config: Any, layers: int) -> None:
    """Set a small depth for a timm transformer, whose size is part of the architecture's name."""
    architecture, arguments = setting(config, "architecture"), vars(config).get("model_args", 0)
    if isinstance(architecture, str) and architecture.startswith(("vit", "eva", "deit")) and arguments != 0:
        put(config, "model_args", {"depth": layers, **(arguments or {})})


def _shrink_experts(config: Any) -> None:
    for name, count in list(own_settings(config)):
        if name.endswith("experts") and isinstance(count, int) and count > 8:
            for beside, most in {name: 8, **_BESIDE_EXPERTS}.items():
                limit(config, beside, most)


def _shrink_vocabulary(config: Any, ids: dict[int, int]) -> None:
    shrunk = False
    for name, size in list(own_settings(config)):
        if _counts_tokens(name) and "type_" not in name and isinstance(size, int) and size > 2 * VOCABULARY:
            put(config, name, VOCABULARY)
            shrunk = True
    for name, value in list(own_settings(config)):
        if is_id(name):
            put(config, name, mapped(value, functools.partial(_small_id, ids=ids)))
    if shrunk:
        limit(config, "pad_token_id", VOCABULARY - 1)


def _counts_tokens(name: str) -> bool:
    return "vocab_size" in name or name.endswith("_vocab")


def _small_id(token: int, ids: dict[int, int]) -> int:
    return token if token < VOCABULARY else ids.setdefault(token, VOCABULARY - 2 - len(ids) % (VOCABULARY - 20))
