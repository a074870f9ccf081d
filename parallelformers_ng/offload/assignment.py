"""Assigns the weights of each layer to the device, to RAM or to the disk, within a budget."""

from __future__ import annotations

from torch import nn

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.offload.budgets import Budget
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import is_within
from parallelformers_ng.sharding.tiers import Place, Tiers
from parallelformers_ng.sharding.wording import human_bytes


def tiers_for(model: nn.Module, plan: ShardPlan, budget: Budget | None) -> Tiers | None:
    """Decide whether the weights of each layer stay on the device, in RAM or on disk.

    The result is None if all weights fit on the devices, or without a budget. A device always has all weights outside
    of layers, the running layer, and the next layer, even if the next layer exceeds the budget. Of the other layers, as
    many as fit stay on the device, spread evenly over the model, so that an offloaded layer is copied while other
    layers run. Offloaded layers go to RAM up to the RAM budget, then to disk.
    """
    if budget is None:
        return None
    plan = plan.as_stored
    layers = _layers(model, plan)
    places: list[dict[str, Place]] = []
    for rank, (name, room) in enumerate(budget.devices):
        sizes = _sizes(plan, layers, rank)
        others = plan.bytes_per_rank[rank] - sum(sizes.values())
        largest = max(sizes.values(), default=0)
        if plan.bytes_per_rank[rank] <= room:
            stays = set(sizes)
        elif others + largest > room:
            raise ParallelError(
                f"fit: max_memory of {name} is {human_bytes(room)}; rank {rank} of {plan.model_class} has"
                f" {human_bytes(others)} of weights outside of layers and {human_bytes(largest)} in its largest layer;"
                f" give at least {human_bytes(others + largest)}, or more devices"
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
    """Move layers in `places` from RAM to disk until the RAM budget is met; each rank moves the same fraction."""
    in_ram = [
        {path: size for path, size in _sizes(plan, layers, rank).items() if of_rank[path] == "cpu"}
        for rank, of_rank in enumerate(places)
    ]
    total = sum(sum(sizes.values()) for sizes in in_ram)
    if total > budget.cpu and budget.folder is None:
        raise ParallelError(
            f"fit: {human_bytes(total)} of weights do not fit on the devices, and max_memory['cpu'] is"
            f" {human_bytes(budget.cpu)}; give an offload_folder for the overflow"
        )
    for sizes, of_rank in zip(in_ram, places, strict=True):
        stays = _spread(sizes, budget.cpu * sum(sizes.values()) // max(1, total))
        of_rank.update(dict.fromkeys(sizes.keys() - stays, "disk"))


def _spread(sizes: dict[str, int], room: int) -> set[str]:
    """Choose layers, evenly spread over the model, whose sizes add up to at most `room` bytes."""
    total, credit, stays = sum(sizes.values()), 0, set()
    for path, size in sizes.items():
        credit += size * min(room, total)
        if credit >= size * total:
            stays.add(path)
            credit -= size * total
    return stays


def _sizes(plan: ShardPlan, layers: dict[str, list[str]], rank: int) -> dict[str, int]:
    """Return, for each layer of which the rank has weights, the path of the layer and the bytes of these weights."""
    sizes = {path: sum(plan.tensors[name].bytes_on(rank) for name in names) for path, names in layers.items()}
    return {path: size for path, size in sizes.items() if size}


def _layers(model: nn.Module, plan: ShardPlan) -> dict[str, list[str]]:
    """Map the path of each layer of a model to the storage names of the parameters that only this layer uses.

    A layer is an item of an outermost `ModuleList`, and is or contains a block of the plan.
    """
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    aliases, layers = plan.aliases(), dict[str, list[str]]()
    for block in plan.blocks:
        around = next((path for path in lists if is_within(block, path) and block != path), None)
        if around is not None:
            path = f"{around}.{block.removeprefix(around + '.').split('.')[0]}"
            owned = (tensor.name for tensor in plan.stored() if not tensor.is_buffer)
            layers[path] = [name for name in owned if all(is_within(alias, path) for alias in aliases[name])]
    return {path: names for path, names in layers.items() if names}
