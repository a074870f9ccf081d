"""Makes models of other sizes than a proof's twins: six heads on three key/value heads, odd widths, one more layer.

The seeds differ, too. Results proven on a twin must hold for models of these sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from parallelformers_ng.autopolicy.config_numbers import Shapes
from parallelformers_ng.autopolicy.settings import parts_of, setting
from parallelformers_ng.autopolicy.shrink import Shrinking, shrink
from parallelformers_ng.autopolicy.twin import Twin
from parallelformers_ng.autopolicy.twin_making import build_tiny, first_choice
from parallelformers_ng.autopolicy.twin_observation import observe, observe_single_layers
from parallelformers_ng.errors import UnsupportedModelError

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_HEAD_COUNT = re.compile(r"(^|_)(heads|n_head|nhead)$")
_KEY_COUNT = re.compile(r"key_value_heads$|kv_heads$|num_k_heads$|kv_n_heads$")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim")
_INNER = re.compile(r"(^|_)(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|dim_feedforward)$")
_VOCABULARY = 149
_INNER_WIDTH = 74


def varied_twin(cls: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> Twin:
    """Return a tiny model of other sizes than `make_twin` would choose, with probes.

    Raises:
        UnsupportedModelError: no variation runs.
    """
    failures = []
    for varied in _variations(config, first_choice(cls, config).shapes):
        try:
            model = build_tiny(cls, varied, seed)
        except Exception as error:  # modelling code may accept only some combinations of sizes
            failures.append(f"{type(error).__name__}: {error}".partition("\n")[0][:200])
            continue
        if model is None:
            failures.append("too large")
            continue
        twin = observe(model, seed + 1)
        if twin.probes:
            return observe_single_layers(twin, seed + 1)
        failures.append(twin.unreached[:200])
    raise UnsupportedModelError(f"no variation of {cls.__name__} runs: {'; '.join(failures[:2])}")


def _variations(config: PreTrainedConfig, shapes: Shapes) -> Iterator[PreTrainedConfig]:
    """Yield variations of a configuration, the most different first."""
    for heads, inner, more in ((1, 1, 1), (1, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 1)):
        for spare in (0, 1):
            spared = Shrinking(spare=spare, keep_images=bool(spare), keep_vocabulary=bool(spare), shapes=shapes)
            small = shrink(config, spared)
            changed = _vary_heads(small) if heads else False
            changed = (_vary_inner(small) if inner else False) or changed
            changed = (_vary_counts(small) if more else False) or changed
            if changed:
                yield small


def _vary_heads(config: PreTrainedConfig) -> bool:
    """Set six query heads, and three key/value heads if query heads share key/value heads; adapt all dependent
    widths."""
    parts = list(parts_of(config))
    widths: dict[int, int] = {}
    changed = False
    for part in parts:
        heads = next((value for name in _HEADS if isinstance(value := setting(part, name), int)), 0)
        if heads <= 1 or heads == 6:
            continue
        width = next((value for name in _WIDTHS if isinstance(value := setting(part, name), int)), 0)
        if not isinstance(setting(part, "head_dim"), int):
            if width % heads:
                continue
            widths[width] = width // heads * 6
        for name, value in list(vars(part).items()):
            if not _HEAD_COUNT.search(name) or type(value) is not int or value <= 1:
                continue
            if _KEY_COUNT.search(name):
                part.__dict__[name] = 6 if value == heads else 3
            elif value == heads:
                part.__dict__[name] = 6
        changed = True
    for part in parts:
        for name, value in list(vars(part).items()):
            if type(value) is int and value in widths and not re.search(r"vocab|image|token|position|length", name):
                part.__dict__[name] = widths[value]
    return changed


def _vary_inner(config: PreTrainedConfig) -> bool:
    """Set the inner width of MLPs to a number divisible by two only."""
    changed = False
    for part in parts_of(config):
        for name, value in list(vars(part).items()):
            if _INNER.search(name) and type(value) is int and value > _INNER_WIDTH:
                part.__dict__[name] = _INNER_WIDTH
                changed = True
    return changed


def _vary_counts(config: PreTrainedConfig) -> bool:
    """Set three layers, unless lists describe the layers one by one, and another vocabulary."""
    changed = False
    for part in parts_of(config):
        lists = [v for v in vars(part).values() if isinstance(v, (list, tuple))]
        for name, value in list(vars(part).items()):
            if re.search(r"(^|_)(num_hidden_layers|n_layer|num_layers|(en|de)coder_layers)$", name) and value == 2:
                if not any(len(items) == 2 for items in lists):
                    part.__dict__[name] = 3
                    changed = True
            elif name == "vocab_size" and value == 131:
                part.__dict__[name] = _VOCABULARY
                changed = True
    return changed
