"""Translates transformers' own tensor-parallel plans (`base_model_tp_plan`) into this library's rules.

They name layers by patterns (`layers.*.mlp.gate_proj`: "colwise") and leave attention whole in many models; what
they leave is completed by `inference.py`, and all of it has to pass the twin proof, as some of them are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.proposal import Proposal
from parallelformers_ng.sharding.rules import Column, Row, Rule
from parallelformers_ng.sharding.structure import Layer

_COLUMN = ("colwise", "local_colwise")
_ROW = ("rowwise", "local_rowwise")
_PACKED = ("packed_colwise", "local_packed_colwise", "fused_colwise")


def native_styles(model: nn.Module) -> dict[str, str]:
    """Module name → style of the native plan, those of parts under their prefix."""
    found: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()]
    for prefix, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        plans = [getattr(part, "_tp_plan", None) or {}, getattr(part.config, "base_model_tp_plan", None) or {}]
        for pattern, style in ((p, s) for plan in plans for p, s in plan.items()):
            parts = [re.escape(piece).replace(r"\*", "[^.]+") for piece in pattern.split(".")]
            whole = re.compile((re.escape(prefix) + r"\." if prefix else "") + r"\.".join(parts) + "$")
            for name in names:
                if whole.match(name):
                    found.setdefault(name, str(style))
    return found


def native_proposals(model: nn.Module, layers: Sequence[Layer]) -> list[Proposal]:
    """The feed-forwards of a native plan: column-parallel layers and the row-parallel one beside them.

    Attention is proposed by `inference.propose`, since the native plan does not say what counts its heads.
    """
    styles = native_styles(model)
    beside: dict[tuple[str, str], list[Layer]] = {}
    for layer in layers:
        if layer.name in styles:
            parent = layer.place.path.rpartition(".")[0]
            found = beside.setdefault((layer.place.block, parent), [])
            if all(layer.place != other.place for other in found):
                found.append(layer)
    proposals = []
    for (block, _), group in beside.items():
        downs = [layer for layer in group if styles[layer.name] in _ROW]
        ups = [layer for layer in group if styles[layer.name] in (*_COLUMN, *_PACKED)]
        if len(downs) != 1 or not ups or any(up.outputs not in (downs[0].inputs, 2 * downs[0].inputs) for up in ups):
            continue
        if any(re.search(r"attn|attention", layer.name) for layer in group):
            continue
        rules: dict[str, Rule] = {
            up.place.path: Column("column", fused=2 if up.outputs == 2 * downs[0].inputs else 1) for up in ups
        }
        rules[downs[0].place.path] = Row("column")
        proposals.append(Proposal(block, "mlp", (rules,), tuple(rules)))
    return proposals
