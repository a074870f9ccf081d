"""Assigns each layer of a model to the devices, to RAM or to disk, by a budget."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.offload.budgets import Budget
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import is_within
from parallelformers_ng.sharding.tiers import Place, Tiers
from parallelformers_ng.sharding.wording import human_bytes


def tiers_for(model: nn.Module, plan: ShardPlan, budget: Budget | None) -> Tiers | None:
    """Assign places to the weights by a budget; None if all of them fit on their devices.

    A rank's device holds everything outside of layers, the running layer, the next layer, and as many others as there
    is room for. These are spread evenly, so that an absent layer comes while others run. Without room for the next
    layer, it comes on top. As many of the absent layers as fit are in RAM.

    Raises:
        ParallelError: a device has no room for the least of it, or neither RAM nor a folder has for the rest.
    """
    if budget is None:
        return None
    plan = plan.held
    layers = _layers(model, plan)
    places: list[dict[str, Place]] = []
    for rank, (name, room) in enumerate(budget.devices):
        sizes = {path: size for path, names in layers.items() if (size := _bytes(plan, names, rank))}
        others = plan.bytes_per_rank[rank] - sum(sizes.values())
        largest = max(sizes.values(), default=0)
        if others + sum(sizes.values()) <= room:
            stays = set(sizes)
        elif others + largest > room:
            raise ParallelError(
                f"fit: max_memory of {name} is {human_bytes(room)}; rank {rank} of {plan.model_class} has"
                f" {human_bytes(others)} of weights in no layer and {human_bytes(largest)} in its largest one: give it"
                f" {human_bytes(others + largest)} at least, or more devices"
            )
        else:
            stays = _spread(sizes, max(0, room - others - 2 * largest))
        places.append({path: "device" if path in stays else "cpu" for path in sizes})
    if all(place == "device" for of_rank in places for place in of_rank.values()):
        return None
    _leave_to_disk(plan, layers, places, budget)
    return Tiers(layers, places, budget.is_cuda, budget.folder)


def _leave_to_disk(
    plan: ShardPlan, layers: dict[str, list[str]], places: list[dict[str, Place]], budget: Budget
) -> None:
    """Send layers from RAM to disk until the rest fits, the same share of each rank."""
    in_ram = [
        {path: _bytes(plan, layers[path], rank) for path, place in of_rank.items() if place == "cpu"}
        for rank, of_rank in enumerate(places)
    ]
    total = sum(sum(sizes.values()) for sizes in in_ram)
    if total > budget.cpu and budget.folder is None:
        raise ParallelError(
            f"fit: {human_bytes(total)} of weights have no room on the devices, and max_memory['cpu'] is"
            f" {human_bytes(budget.cpu)}; give an offload_folder for the rest"
        )
    for sizes, of_rank in zip(in_ram, places, strict=True):
        stays = _spread(sizes, budget.cpu * sum(sizes.values()) // max(1, total))
        of_rank.update(dict.fromkeys(sizes.keys() - stays, "disk"))


def _spread(sizes: dict[str, int], room: int) -> set[str]:
    """Return the layers that stay within so many bytes, spread evenly over all."""
    total, credit, stays = sum(sizes.values()), 0, set()
    for path, size in sizes.items():
        credit += size * min(room, total)
        if credit >= size * total:
            stays.add(path)
            credit -= size * total
    return stays


def _bytes(plan: ShardPlan, names: Iterable[str], rank: int) -> int:
    return sum(plan.tensors[name].bytes_on(rank) for name in names)


def _layers(model: nn.Module, plan: ShardPlan) -> dict[str, list[str]]:
    """Return the layers of a model: the outermost items of lists of modules that policies apply to, and the
    parameters that each has for itself."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    items = {}
    for block in plan.blocks:
        around = next((path for path in lists if is_within(block, path) and block != path), None)
        if around is not None:
            items[f"{around}.{block.removeprefix(around + '.').split('.')[0]}"] = True
    aliases = plan.aliases()
    layers: dict[str, list[str]] = {}
    for path in items:
        names = [
            tensor.name
            for tensor in plan.stored()
            if not tensor.is_buffer and all(is_within(name, path) for name in aliases[tensor.name])
        ]
        if names:
            layers[path] = names
    return layers
