"""Forecasts the memory and the decode speed of a model on devices, for each layout. Starts no processes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.planning import CustomPolicies, make_plan
from parallelformers_ng.errors import PlacementError, UnsupportedModelError
from parallelformers_ng.model.kinds import check_model
from parallelformers_ng.option_checks import check_number
from parallelformers_ng.options import FitOptions, QuantizeOptions, read_quantize
from parallelformers_ng.planner.devices import LINKS, Device, device_named
from parallelformers_ng.planner.measured import measured_step
from parallelformers_ng.planner.observation import Observation, Work, observe
from parallelformers_ng.sharding.casting import target_dtype
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.placed import Placed
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.wording import human_bytes

_TITLES = ("tensor × pipeline", "weights", "caches", "activations", "room", "tokens/s")
_WIDTHS = {1, 2, 4, 8, 16}
_ANY = 1 << 16  # no limit on the number of stages: more than any model has layers
_OPERATOR_SECONDS = 3e-6  # seconds that a kernel takes in addition to the time for moving its bytes
_READ_SHARE = 0.8  # fraction of the data sheet's bandwidth that large matrix products reach
_STEP_SECONDS = 50e-6  # seconds of a decode step outside the model: the choice of a token, and the loop of `generate`


@dataclass(frozen=True)
class Memory:
    """Memory of a device, in bytes.

    Attributes:
        weights: parameters and buffers.
        caches: keys, values and states of all sequences at their full length.
        activations: peak of temporary memory during the prefill of all prompts at once.
        room: limit for the sum of weights, caches and activations.
    """

    weights: float
    caches: float
    activations: float
    room: float

    @property
    def used(self) -> float:
        """Sum of weights, caches and activations, in bytes."""
        return self.weights + self.caches + self.activations

    @property
    def fits(self) -> bool:
        """Whether `used` is at most `room`."""
        return self.used <= self.room


@dataclass(frozen=True)
class Arrangement:
    """A layout of a model over devices, with its memory and its decode speed.

    Attributes:
        tensor: number of ranks that share each layer.
        pipeline: number of stages.
        memory: memory of the fullest device.
        tokens_per_second: decoded tokens per second of all sequences at their full length; None for several stages.
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
        model: name of the model's class.
        device: name of the device.
        num_gpus: number of devices.
        batch: number of sequences that are decoded together.
        length: prompt and new tokens of a sequence.
        dtype: name of the data type of the computation.
        arrangements: layouts, sorted: layouts that fit come first, and faster layouts come before slower layouts.
        notes: sentences about the best layout and the impossible layouts.
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
        """Best layout, the first of `arrangements`; None if no layout fits."""
        return self.arrangements[0] if self.arrangements[0].memory.fits else None

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as plain data for JSON; sizes are in bytes."""
        layouts = [
            vars(each)
            | {"memory": {name: round(size) for name, size in vars(each.memory).items()}, "fits": each.memory.fits}
            for each in self.arrangements
        ]
        return vars(self) | {"fits": self.best is not None, "arrangements": layouts}

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
    """Forecast the memory and the decode speed of a model on absent devices of one host.

    One rank's shard of the model runs on `meta`: once for the prefill, and once for a decode step. Figures of data
    sheets turn the bytes that the decode step moves into seconds. docs/planning.md has the formulas and their sources,
    and compares forecasts with measurements.

    Args:
        model: transformers model with `generate`, loaded or on `meta`.
        device: name of an entry of `parallelformers_ng.planner.devices.DEVICES`: "h100", "a100", ….
        num_gpus: number of devices.
        batch: number of sequences that are decoded together.
        length: prompt and new tokens of a sequence. The forecast describes the last decode step.
        dtype: same as in `parallelize`.
        custom_policies: same as in `parallelize`.
        quantize: same as in `parallelize`.

    Raises:
        ParallelError: an argument is invalid.
        AlreadyParallelizedError: the model is parallelized already.
        PolicyError: a policy does not fit the model.
        UnsupportedModelError: no policy fits the model, the model does not generate or returns no cache, or its
            forward fails on `meta`.
    """
    for name, value, least in (("num_gpus", num_gpus, 1), ("batch", batch, 1), ("length", length, 2)):
        check_number(value, name, least)
    check_model(model)
    target, bits = target_dtype(False, dtype), read_quantize(quantize)

    @functools.cache
    def planned(ranks: int, quantize: QuantizeOptions | None) -> ShardPlan:
        return make_plan(model, ranks, custom_policies, target, FitOptions(), quantize)

    chosen, impossible, observations = device_named(device), list[str](), dict[int, Observation]()
    name = str(target or model.dtype).removeprefix("torch.")
    weights, measurements = (bits and bits.scheme) or name, list[str]()
    arrangements = list[Arrangement]()
    for tensor in sorted(n for n in {*_WIDTHS, num_gpus} if n <= max(_WIDTHS) and num_gpus % n == 0):
        try:
            shard_plan = planned(tensor, bits)
            fullest = max(range(tensor), key=shard_plan.bytes_per_rank.__getitem__)
            observations[tensor] = observe(model, shard_plan, fullest, batch, length)
        except UnsupportedModelError as error:
            impossible.append(f"{tensor} ranks per layer are impossible: {error}")
            continue
        stages, memory = _laid_out(model, shard_plan, observations[tensor], num_gpus // tensor, chosen.usable)
        speed = None
        if stages == 1:
            known = measured_step(device, tensor, weights, batch)
            scale = 1.0 if known is None else known.computed / known.measured
            speed = batch / step_seconds(chosen, observations[tensor].step, tensor, scale)
            measurements += [] if known is None else [str(known)]
        arrangements.append(Arrangement(tensor, stages, memory, speed))
    if not arrangements:
        raise UnsupportedModelError("; ".join(impossible))
    arrangements.sort(key=lambda each: (not each.memory.fits, -(each.tokens_per_second or 0)))
    best = arrangements[0]
    memory = best.memory
    sequences = math.floor((memory.room - memory.weights) / (memory.used - memory.weights) * batch)
    if memory.fits:
        notes = [f"Best layout: {best}. Up to {sequences} sequences of {length} tokens fit."]
    else:
        notes = [
            f"The model does not fit: layout {best} needs {human_bytes(memory.used)} on the fullest device,"
            f" {human_bytes(memory.used - memory.room)} more than the limit of {human_bytes(memory.room)}."
            " The model would fit"
        ]
        stages, wider = _laid_out(model, planned(best.tensor, bits), observations[best.tensor], _ANY, memory.room)
        if wider.fits:
            notes.append(f"- on {best.tensor * stages} devices: {best.tensor} × {stages};")
        if sequences > 0:
            notes.append(f"- with {sequences} sequences at a time instead of {batch};")
        if bits is None:
            int8_plan = planned(best.tensor, QuantizeOptions("int8"))
            int8_memory = _memory(model, int8_plan, observations[best.tensor], best.pipeline, memory.room)
            if int8_memory.fits:
                notes.append(
                    f"- with quantize='int8': {human_bytes(int8_memory.weights)} of weights on the fullest device;"
                )
        if len(notes) == 1:
            notes.append("- on devices with more memory.")
        notes[-1] = notes[-1].rstrip(";.") + "."
    of_speed = "The speeds are computed: this library was not measured on such a device."
    if measurements:
        of_speed = f"Scaled by measurements: {'; '.join(measurements)}. Other speeds, and all sums, are computed."
    notes.append(of_speed)
    return Forecast(type(model).__name__, device, num_gpus, batch, length, name, arrangements, [*notes, *impossible])


def _laid_out(
    model: nn.Module, plan: ShardPlan, observation: Observation, most: int, room: float
) -> tuple[int, Memory]:
    """Return the smallest number of stages with which the model fits, and the memory of the fullest device.

    If the model does not fit with `most` stages, or with a stage for each layer, return the larger number tried.
    """
    stages, memory = 1, _memory(model, plan, observation, 1, room)
    while not memory.fits and stages < most:
        try:
            memory = _memory(model, plan, observation, stages + 1, room)
        except PlacementError:  # the model has no more layers
            break
        stages += 1
    return stages, memory


def _memory(model: nn.Module, plan: ShardPlan, observation: Observation, stages: int, room: float) -> Memory:
    if stages == 1:
        return Memory(max(plan.bytes_per_rank), sum(observation.caches.values()), observation.peak, room)
    staged = in_stages(plan, model, [1 / stages] * stages)
    first = {layer.path: layer.attributes[0]["stop"].holders[0] for layer in staged.layers if layer.cls is Placed}
    caches = [0.0] * staged.world_size
    for unit, size in observation.caches.items():
        for rank in range(first.get(unit, 0), first.get(unit, 0) + plan.world_size):
            caches[rank] += size
    fullest = max(zip(staged.bytes_per_rank, caches, strict=True), key=sum)
    return Memory(*fullest, observation.peak, room)


def step_seconds(device: Device, works: Sequence[Work], ranks: int, scale: float = 1.0) -> float:
    """Return the seconds of a compiled decode step on one rank.

    The operators between two matrix products count as one kernel, which moves the bytes of the largest operator. A
    kernel takes 3 µs, plus the time to move its bytes at 0.8 of the device's bandwidth. docs/planning.md says how the
    two figures were fitted to measurements.

    The result includes 50 µs for the choice of a token and the loop of `generate`. All but the sums between ranks is
    multiplied by `scale`.
    """
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
    return scale * (busy + _STEP_SECONDS) + (exchanged if ranks > 1 else 0.0)
