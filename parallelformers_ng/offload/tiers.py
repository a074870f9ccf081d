"""Which layers of a model each rank keeps on its device, which in RAM, and which on disk."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.offload.budgets import Budget
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.table import human_bytes
from parallelformers_ng.sharding.tensors import is_within

Place = Literal["device", "cpu", "disk"]


@dataclass(frozen=True)
class Tiers:
    """Where the weights of each layer lie. What is in no layer (embeddings, the head, buffers) is on the devices.

    Attributes:
        layers: path of each layer that may lie elsewhere → the names of what ranks hold of its parameters, in the
            model's order.
        places: for each rank, where each layer lies of which it holds anything.
        is_cuda: see `Budget`.
        folder: where the files go.
    """

    layers: dict[str, list[str]]
    places: list[dict[str, Place]]
    is_cuda: bool
    folder: str | None

    def place(self, name: str, rank: int) -> Place:
        """Where a rank has a stored tensor."""
        path = self._layer_of.get(name)
        return "device" if path is None else self.places[rank].get(path, "device")

    def moved(self, rank: int) -> Iterator[tuple[str, list[str]]]:
        """The layers that come before they run and are let go afterwards: path, stored names."""
        for path, place in self.places[rank].items():
            if place == "disk" or (place == "cpu" and self.is_cuda):
                yield path, self.layers[path]

    def bytes_in(self, place: Place, plan: ShardPlan, rank: int) -> int:
        """Of a rank's weights."""
        return sum(tensor.bytes_on(rank) for tensor in plan.held.stored() if self.place(tensor.name, rank) == place)

    def bytes_moved(self, plan: ShardPlan, rank: int) -> int:
        """Each time that all layers run, a token of a decoder."""
        return sum(_bytes(plan.held, names, rank) for _, names in self.moved(rank))

    def lines(self, plan: ShardPlan) -> Iterator[str]:
        """For people."""
        for rank in range(plan.world_size):
            device, ram, disk = (human_bytes(self.bytes_in(place, plan, rank)) for place in ("device", "cpu", "disk"))
            moved = human_bytes(self.bytes_moved(plan, rank))
            yield f"rank {rank}: {device} on its device, {ram} in RAM, {disk} on disk; {moved} moved for each token"

    @functools.cached_property
    def _layer_of(self) -> dict[str, str]:
        return {name: path for path, names in self.layers.items() for name in names}


def tiers_for(model: nn.Module, plan: ShardPlan, budget: Budget | None) -> Tiers | None:
    """Where the weights go by a budget; None where all of them fit on their devices.

    On its device a rank has what is in no layer, the layer that runs, the one on its way, and as many others as there
    is room for, spread evenly, so that one that lies elsewhere comes while others run. Where there is no room for the
    one on its way, it comes on top. Of those that are elsewhere, as many are in RAM as fit.

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
    """Of the layers in RAM, send those to disk for which RAM has no room, of each rank the same share."""
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
    """Those that stay where there is room for so many bytes, evenly among all."""
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
    """The layers of a model: the outermost items of lists of modules that policies apply to, and the parameters that
    each has for itself."""
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
