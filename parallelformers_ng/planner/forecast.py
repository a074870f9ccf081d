"""Model, devices, sequences → whether it fits, how fast it decodes, and how to lay it out. Nothing is started."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.api import check_model
from parallelformers_ng.autopolicy.planning import CustomPolicies, make_plan
from parallelformers_ng.errors import ParallelError, PlacementError, UnsupportedModelError
from parallelformers_ng.options import FitOptions, QuantizeOptions, read_quantize
from parallelformers_ng.planner.devices import LINKS, Device, device_named
from parallelformers_ng.planner.observation import Observation, Work, observe
from parallelformers_ng.sharding.casting import target_dtype
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.placed import Placed
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.wording import human_bytes

_TITLES = ("tensor × pipeline", "weights", "caches", "activations", "room", "tokens/s")
_WIDTHS = {1, 2, 4, 8, 16}
_ANY = 1 << 16
"""More stages than models have parts."""
_OPERATOR_SECONDS = 3e-6
_READ_SHARE = 0.8
"""Fraction of the data sheet's bandwidth that large products reach."""
_STEP_SECONDS = 50e-6
"""Of a step besides the model's operators: the choice of a token and the loop."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a device.

    Attributes:
        weights: parameters and buffers.
        caches: keys, values and states of all sequences at their full length.
        activations: peak temporary memory, while the prompts of all sequences are read at once.
        room: bytes that there are for all of it.
    """

    weights: float
    caches: float
    activations: float
    room: float

    @property
    def used(self) -> float:
        return self.weights + self.caches + self.activations

    @property
    def fits(self) -> bool:
        return self.used <= self.room


@dataclass(frozen=True)
class Arrangement:
    """tensor × pipeline, and what they give.

    Attributes:
        tensor: ranks that share each layer.
        pipeline: number of stages.
        memory: memory of the fullest device.
        tokens_per_second: decoded, of all sequences, at their full length; None for several stages.
    """

    tensor: int
    pipeline: int
    memory: Memory
    tokens_per_second: float | None

    def __str__(self) -> str:
        return f"{self.tensor} × {self.pipeline}"


@dataclass(frozen=True)
class Forecast:
    """A forecast of a model's memory and speed.

    Attributes:
        model: its class.
        device: name of the device.
        num_gpus: how many there are.
        batch, length: sequences at a time, and tokens of each, prompt and answer together.
        dtype: data type of the computation.
        arrangements: ways to lay it out, those that fit first, the fastest of them first.
        notes: remarks on them, in sentences.
    """

    model: str
    device: str
    num_gpus: int
    batch: int
    length: int
    dtype: str
    arrangements: list[Arrangement]
    notes: list[str]

    @property
    def best(self) -> Arrangement | None:
        """The one to take; None if none fits."""
        return self.arrangements[0] if self.arrangements[0].memory.fits else None

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data: bytes, tokens per second."""
        ways = [
            vars(each)
            | {"memory": {name: round(size) for name, size in vars(each.memory).items()}, "fits": each.memory.fits}
            for each in self.arrangements
        ]
        return vars(self) | {"fits": self.best is not None, "arrangements": ways}

    def __str__(self) -> str:
        devices = f"{self.num_gpus} {self.device} of one host"
        head = f"{self.model} in {self.dtype} on {devices}: {self.batch} sequences of {self.length} tokens"
        rows: list[tuple[str, ...]] = [_TITLES]
        for each in self.arrangements:
            sizes = map(human_bytes, vars(each.memory).values())
            speed = "" if each.tokens_per_second is None else f"{each.tokens_per_second:.0f}"
            rows.append((str(each), *sizes, speed if each.memory.fits else "does not fit"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, "", *table, "", *self.notes])


def forecast(
    model: PreTrainedModel,
    *,
    device: str = "h100",
    num_gpus: int = 8,
    batch: int = 1,
    length: int = 4096,
    dtype: torch.dtype | str | None = None,
    custom_policies: CustomPolicies = None,
    quantize: str | QuantizeOptions | Mapping[str, Any] | None = None,
) -> Forecast:
    """Forecast the memory and speed of `model` on devices that may not be here. A model on `meta` will do.

    A rank's share of the model runs on `meta`, once as a prompt and once as a decode step; what it moves is timed by
    data sheets: docs/planning.md has the model, its sources, and how it compares with what was measured.

    Args:
        model: a transformers model that generates.
        device: a name of `parallelformers_ng.planner.devices.DEVICES`: "h100", "a100", ….
        num_gpus: how many there are, in one host.
        batch: sequences that are decoded at a time.
        length: tokens of each, prompt and answer together; memory and speed are those at the end.
        dtype: same as in `parallelize`.
        custom_policies: same as in `parallelize`.
        quantize: same as in `parallelize`.

    Raises:
        ParallelError: an argument has a value that it does not take.
        UnsupportedModelError: no policy fits, it does not generate, or it cannot be followed without numbers.
    """
    for name, value, least in (("num_gpus", num_gpus, 1), ("batch", batch, 1), ("length", length, 2)):
        if value < least:
            raise ParallelError(f"{name} is {value}; it takes a number, at least {least}")
    check_model(model)
    target, bits = target_dtype(False, dtype), read_quantize(quantize)

    @functools.cache
    def planned(ranks: int, quantize: QuantizeOptions | None) -> ShardPlan:
        return make_plan(model, ranks, custom_policies, target, FitOptions(), quantize)

    chosen, refusals, seen = device_named(device), list[str](), dict[int, Observation]()
    arrangements = list[Arrangement]()
    for tensor in sorted(n for n in {*_WIDTHS, num_gpus} if n <= max(_WIDTHS) and num_gpus % n == 0):
        try:
            shard_plan = planned(tensor, bits)
            fullest = max(range(tensor), key=shard_plan.bytes_per_rank.__getitem__)
            seen[tensor] = observe(model, shard_plan, fullest, batch, length)
        except UnsupportedModelError as error:
            refusals.append(f"Not {tensor} ranks to a layer: {error}")
            continue
        stages, memory = _laid_out(model, shard_plan, seen[tensor], num_gpus // tensor, chosen.usable)
        speed = None if stages > 1 else batch / step_seconds(chosen, seen[tensor].step, tensor)
        arrangements.append(Arrangement(tensor, stages, memory, speed))
    if not arrangements:
        raise UnsupportedModelError("; ".join(refusals))
    arrangements.sort(key=lambda each: (not each.memory.fits, -(each.tokens_per_second or 0)))
    best = arrangements[0]
    memory = best.memory
    sequences = math.floor((memory.room - memory.weights) / (memory.used - memory.weights) * batch)
    if memory.fits:
        notes = [f"Take {best}. There is room for {sequences} sequences of {length} tokens."]
    else:
        notes = [
            f"It does not fit: {best} needs {human_bytes(memory.used)} on a device that has room for"
            f" {human_bytes(memory.room)}, {human_bytes(memory.used - memory.room)} too much. It would fit"
        ]
        stages, wider = _laid_out(model, planned(best.tensor, bits), seen[best.tensor], _ANY, memory.room)
        if wider.fits:
            notes.append(f"- on {best.tensor * stages} devices: {best.tensor} × {stages};")
        if sequences > 0:
            notes.append(f"- with {sequences} sequences at a time in the place of {batch};")
        if bits is None:
            small = planned(best.tensor, QuantizeOptions("int8"))
            less = _memory(model, small, seen[best.tensor], best.pipeline, memory.room)
            if less.fits:
                notes.append(
                    f"- with quantize='int8', which leaves {human_bytes(less.weights)} of weights on a device;"
                )
        if len(notes) == 1:
            notes.append("- on devices with more memory.")
        notes[-1] = notes[-1].rstrip(";.") + "."
    name = str(target or model.dtype).removeprefix("torch.")
    return Forecast(type(model).__name__, device, num_gpus, batch, length, name, arrangements, [*notes, *refusals])


def _laid_out(model: nn.Module, plan: ShardPlan, seen: Observation, most: int, room: float) -> tuple[int, Memory]:
    """Return the fewest stages in which it fits, else as many as there may be; and the memory of its fullest device."""
    stages = min(most, max(1, math.floor(max(plan.bytes_per_rank) / room)))
    while True:
        try:
            memory = _memory(model, plan, seen, stages, room)
        except PlacementError:  # the model has fewer parts
            stages = most = stages - 1
            continue
        if memory.fits or stages == most:
            return stages, memory
        stages += 1


def _memory(model: nn.Module, plan: ShardPlan, seen: Observation, stages: int, room: float) -> Memory:
    """Return the memory of the fullest device, for a plan of one stage's ranks laid out over stages.

    Raises:
        PlacementError: the model has fewer parts than there are stages.
    """
    if stages == 1:
        return Memory(max(plan.bytes_per_rank), sum(seen.caches.values()), seen.peak, room)
    staged = in_stages(plan, model, [1 / stages] * stages)
    first = {layer.path: layer.attributes[0]["stop"].holders[0] for layer in staged.layers if layer.cls is Placed}
    caches = [0.0] * staged.world_size
    for unit, size in seen.caches.items():
        for rank in range(first.get(unit, 0), first.get(unit, 0) + plan.world_size):
            caches[rank] += size
    fullest = max(zip(staged.bytes_per_rank, caches, strict=True), key=sum)
    return Memory(*fullest, seen.peak, room)


def step_seconds(device: Device, works: Sequence[Work], ranks: int) -> float:
    """Return a rank's seconds for a decode step that is compiled: operators between two products are one, with the
    bytes of the largest. Each takes a least time, and that of moving its bytes."""
    kernels, exchanged, open_ = list[float](), 0.0, False
    for work in works:
        if work.exchanges:
            exchanged += LINKS[device.link].exchange_seconds(ranks, work.moved, work.gathers)
        elif work.fuses and open_:
            kernels[-1] = max(kernels[-1], work.moved)
        else:
            kernels.append(work.moved)
        open_ = work.fuses
    busy = sum(kernels) / (device.bandwidth * _READ_SHARE) + len(kernels) * _OPERATOR_SECONDS
    return busy + (exchanged if ranks > 1 else 0.0) + _STEP_SECONDS
