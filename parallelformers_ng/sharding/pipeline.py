"""Turns a plan into a plan for a pipeline, in which each stage holds consecutive layers of the model.

If the plan is for several ranks, each stage has as many ranks, among which its layers are sharded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torch import nn

from parallelformers_ng.sharding.layer_uses import is_only_called
from parallelformers_ng.sharding.layers import LayerPlan
from parallelformers_ng.sharding.placed import Placed, Stack, Stop
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.stages import find_stages, tensors_of, units
from parallelformers_ng.sharding.tensor_plan import Cut, Shard, plans_of_tensors
from parallelformers_ng.sharding.vocabulary import find_vocabulary


def in_stages(
    plan: ShardPlan, model: nn.Module, shares: Sequence[float], merged: bool = True, plain: nn.Module | None = None
) -> ShardPlan:
    """Turn a plan for the ranks of one stage into a plan for a pipeline of `len(shares)` stages.

    `shares` has each stage's fraction of the model. The ranks of a stage have consecutive numbers. If `merged`, a stage
    sends only the output of its last block to other stages, not that of every block. `plain` is the model without its
    adapters, for a model with adapters: an adapter is in the stage of its layer.
    """
    modules = dict(model.named_modules())
    parts = [unit for unit in _parts(plain or model) if unit in modules]
    names = {unit: list(tensors_of(model, unit)) for unit in parts}
    placed = {name for stage_names in names.values() for name in stage_names}
    sizes: list[Mapping[Hashable, float]] = [
        {plan.tensors[name].storage: plan.bytes_held(name) for name in stage_names} for stage_names in names.values()
    ]
    everywhere = sum(plan.bytes_held(tensor.name) for tensor in plan.stored() if tensor.name not in placed)
    bounds = find_stages(sizes, shares, everywhere)
    stage_of = {unit: stage for stage, (start, stop) in enumerate(bounds) for unit in parts[start:stop]}
    tensor_stages = {name: stage_of[unit] for unit, stage_names in names.items() for name in stage_names}
    width, stages = plan.world_size, len(shares)

    def staged(name: str) -> Cut:
        tensor = plan.tensors[name]
        if name not in tensor_stages or not tensor.shape:
            return tensor.shards * stages, tensor.rule
        stage = tensor_stages[name]
        own = [_as_range(shard, tensor.shape[0]) for shard in tensor.shards]
        empty = [Shard(shard.dim or 0, ()) for shard in tensor.shards]
        return tuple(chain.from_iterable(own if stage == each else empty for each in range(stages))), f"stage {stage}"

    everyone = [replace(layer, attributes=layer.attributes * stages) for layer in plan.layers]
    return replace(
        plan,
        world_size=width * stages,
        tensors=plans_of_tensors(model, staged, lambda name, *_: plan.tensors[name].dtype),
        layers=[*everyone, *_layers(model, stage_of, width, stages, merged)],
        policy=plan.policy or "stages",
        blocks=list(dict.fromkeys((*plan.blocks, *stage_of))),
        strategy="pipeline" if width == 1 else "tensor+pipeline",
        stages=stages,
    )


def _parts(model: nn.Module) -> list[str]:
    vocabulary = find_vocabulary(model)
    modules = dict(model.named_modules())
    parts = []
    for unit in units(model):
        module = modules.get(unit)
        if module is None or not any(parameter.ndim > 1 for parameter in module.parameters()):
            continue  # every rank holds single parameters and norms, because they are small
        if any(True for _ in module.children()) or unit in vocabulary or is_only_called(model, unit):
            parts.append(unit)
    return parts


def _layers(model: nn.Module, stage_of: dict[str, int], width: int, stages: int, merged: bool) -> list[LayerPlan]:
    layers = []
    lists: dict[str, list[str]] = {}
    order = list(stage_of)
    for unit, before, after in zip(order, ["", *order], [*order[1:], ""], strict=False):
        stage, (above, _, _) = stage_of[unit], unit.rpartition(".")
        stack, _, name = above.rpartition(".")
        is_stacked = merged and isinstance(model.get_submodule(above), nn.ModuleList)
        if is_stacked and name not in lists.setdefault(stack, []):
            lists[stack].append(name)
        begins, ends = (stage_of.get(other) != stage or other.rpartition(".")[0] != above for other in (before, after))
        numbers = {getattr(part, "layer_idx", None) for part in model.get_submodule(unit).modules()}
        cached = tuple(sorted(number for number in numbers if isinstance(number, int) and number >= 0))
        ranks = tuple(range(stage * width, (stage + 1) * width))
        stop = Stop(ranks, stack if is_stacked else None, begins, ends, cached)
        layers.append(LayerPlan(unit, Placed, ({"stop": stop},) * (width * stages)))
    stacks = [
        LayerPlan(path, Stack, ({"stack_path": path, "stack_lists": tuple(names)},) * (width * stages))
        for path, names in lists.items()
    ]
    return [*layers, *stacks]


def _as_range(shard: Shard, rows: int) -> Shard:
    """Write a whole tensor as a range of all rows, because ranks of other stages hold an empty range of rows."""
    return Shard(0, ((0, rows),)) if shard.dim is None and not shard.zero else shard
