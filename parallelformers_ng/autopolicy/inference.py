"""Proposes rules for blocks without a policy, from the structure of the blocks. `proof.py` checks the rules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelformers_ng.autopolicy.projections import Attention
from parallelformers_ng.autopolicy.proposal import Proposal, experts_at, gathered_layer
from parallelformers_ng.sharding.layer_uses import is_only_called
from parallelformers_ng.sharding.rules import Column, Row, Rule
from parallelformers_ng.sharding.structure import Layer, Place, places


def propose(model: nn.Module, layers: Sequence[Layer], live: set[str]) -> list[Proposal]:
    """Return proposals for all blocks of a model.

    `live` has the names of parameters that influence the outputs. A layer outside of attention, multilayer perceptrons
    and experts gets a proposal only if it has at least 1/200 of the weights of `layers`.
    """
    by_name = {layer.name: layer for layer in layers}
    where = places(model)
    proposals: dict[Place, Proposal] = {}
    used: set[str] = set()
    for name, module in model.named_modules():
        place = where[name]
        if _is_experts(name, module, live):
            proposals.setdefault(place, experts_at(place))
        attention = Attention.find(name, place, module, by_name)
        if attention is not None and used.isdisjoint(layer.name for layer in attention.layers):
            used |= {layer.name for layer in attention.layers}
            if place not in proposals and attention.out.place.block == place.block:
                proposals[place] = attention.proposal(live)
    rest = [layer for layer in layers if layer.name not in used]
    for pair in _pairs([layer for layer in rest if not layer.is_embedding]):
        used |= {layer.name for layer in pair}
        proposals.setdefault(pair[-1].place, _mlp(pair))
    total = sum(layer.inputs * layer.outputs for layer in layers)
    for layer in rest:
        if layer.is_embedding and not is_only_called(model, layer.name):
            continue  # `build_plan` shards such tables without a rule
        if layer.name not in used and layer.inputs * layer.outputs * 200 >= total:
            proposals.setdefault(layer.place, gathered_layer(layer.place))
    return list(proposals.values())


def _is_experts(name: str, module: nn.Module, live: set[str]) -> bool:
    names = {key for key, p in module._parameters.items() if p is not None and p.ndim == 3}
    complete = "down_proj" in names and names & {"gate_up_proj", "up_proj"}
    return bool(complete) and f"{name}.down_proj" in live


def _pairs(layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """Find multilayer perceptrons: groups `up, down` or `gate, up, down` of layers called one after another.

    The input width of `down` equals the output width of each earlier layer in the group, or half of it.
    """
    pairs = []
    waiting: list[Layer] = []
    for layer in layers:
        if waiting and waiting[-1].place.block != layer.place.block:
            waiting = []
        ups: list[Layer] = []
        for earlier in reversed(waiting):
            fits = earlier.outputs in (layer.inputs, 2 * layer.inputs) and earlier.inputs != earlier.outputs
            if not fits or (ups and (earlier.outputs, earlier.inputs) != (ups[0].outputs, ups[0].inputs)):
                break
            ups.insert(0, earlier)
        if ups and layer.inputs != layer.outputs and not any(up.outputs == 2 * layer.inputs for up in ups[1:]):
            pairs.append((*ups[-2:], layer))
            waiting = []
        else:
            waiting.append(layer)
    return pairs


def _mlp(pair: tuple[Layer, ...]) -> Proposal:
    *ups, down = pair
    fused = 2 if ups[0].outputs == 2 * down.inputs else 1
    rules: dict[str, Rule] = {up.place.path: Column("column", fused=fused) for up in ups}
    rules[down.place.path] = Row("column")
    return Proposal(down.place.block, "mlp", (rules,), tuple(layer.place.path for layer in pair))
