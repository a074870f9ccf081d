"""Model, devices, sequences → whether it fits, how fast it is, and how to lay it out. Nothing is started."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.api import check_model
from parallelformers_ng.autopolicy.planning import CustomPolicies, make_plan
from parallelformers_ng.errors import ParallelError, UnsupportedModelError
from parallelformers_ng.options import FitOptions, QuantizeOptions, read_quantize
from parallelformers_ng.planner.advice import advice
from parallelformers_ng.planner.arrangement import Arrangement
from parallelformers_ng.planner.devices import DEVICES, LINKS, Cluster, named
from parallelformers_ng.planner.here import as_cluster, probe_here
from parallelformers_ng.planner.search import Search
from parallelformers_ng.sharding.casting import target_dtype
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.wording import human_bytes

HERE = "here"

_TITLES: tuple[str, ...] = (
    "tensor × pipeline × replicas", "weights", "caches", "activations", "room", "tokens/s", "exchanges", "first token",
)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """A forecast of a model's memory and speed.

    Attributes:
        model: its class.
        device: name of the device.
        hosts, gpus_per_host: how many there are.
        batch, length: sequences at a time, and tokens of each, prompt and answer together.
        dtype: data type of the computation.
        arrangements: ways to lay it out, those that fit first, the fastest of them first.
        notes: remarks on them, in sentences.
    """

    model: str
    device: str
    hosts: int
    gpus_per_host: int
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
        """Everything as plain data: bytes, seconds."""
        arguments = {
            name: getattr(self, name) for name in ("model", "device", "hosts", "gpus_per_host", "batch", "length")
        }
        ways = [each.as_dict() for each in self.arrangements]
        fits = self.best is not None
        return {**arguments, "dtype": self.dtype, "fits": fits, "arrangements": ways, "notes": self.notes}

    def __str__(self) -> str:
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)} with {self.gpus_per_host} {self.device} each"
        head = f"{self.model} in {self.dtype} on {hosts}: {self.batch} sequences of {self.length} tokens"
        rows = [_TITLES]
        for each in self.arrangements:
            memory = each.memory
            sizes = (human_bytes(size) for size in (memory.weights, memory.caches, memory.activations, memory.room))
            speed = (f"{each.tokens_per_second:.0f}", f"{each.exchange_share:.0%}", f"{each.prompt_seconds:.2f} s")
            rows.append((str(each), *sizes, *(speed if memory.fits else ("does not fit", "", ""))))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, "", *table, "", *self.notes])


def forecast(
    model: PreTrainedModel,
    *,
    device: str = "h100",
    hosts: int = 1,
    gpus_per_host: int = 8,
    batch: int = 1,
    length: int = 4096,
    network: str = "infiniband-ndr",
    decode: str = "auto",
    dtype: torch.dtype | str | None = None,
    custom_policies: CustomPolicies = None,
    quantize: str | QuantizeOptions | Mapping[str, Any] | None = None,
) -> Forecast:
    """Forecast the memory and speed of `model` on devices that may not be here. A model on `meta` will do.

    A rank's share of the model runs on `meta`, once as a prompt and once as a decode step; what it does is timed by
    data sheets: docs/planning.md has the model, its sources, and how it compares with what was measured.

    Args:
        model: a transformers model that generates.
        device: a name of `parallelformers_ng.planner.devices.DEVICES`: "h100", "a100", ….  "here": CPU ranks of this
            machine, which are started and measured: seconds, while nothing else should run.
        hosts: how many.
        gpus_per_host: devices of each.
        batch: sequences that are decoded at a time, over all replicas.
        length: tokens of each, prompt and answer together; memory and speed are those at the end.
        network: between hosts: "infiniband-ndr", "ethernet-100g", ….
        decode: decode mode of `parallelize`: "eager", "cuda_graphs" or "compile"; "auto" is "cuda_graphs".
        dtype: same as in `parallelize`.
        custom_policies: same as in `parallelize`.
        quantize: same as in `parallelize`.

    Raises:
        ParallelError: an argument has a value that it does not take.
        UnsupportedModelError: no policy fits, it does not generate, or it cannot be followed without numbers.
    """
    for name, value, least in (
        ("hosts", hosts, 1),
        ("gpus_per_host", gpus_per_host, 1),
        ("batch", batch, 1),
        ("length", length, 2),
    ):
        if value < least:
            raise ParallelError(f"{name} is {value}; it takes a number, at least {least}")
    if decode not in _DECODE:
        raise ParallelError(f"decode is {decode!r}; it takes one of {', '.join(map(repr, _DECODE))}")
    check_model(model)
    target, bits = target_dtype(False, dtype), read_quantize(quantize)
    computed = target or model.dtype
    if device == HERE:
        cluster_of = _here(hosts, gpus_per_host, decode, computed)
    else:
        cluster_of = _by_data_sheet(device, hosts, gpus_per_host, network, computed)

    def planned(ranks: int, quantize: QuantizeOptions | None) -> ShardPlan:
        return make_plan(model, ranks, custom_policies, target, FitOptions(), quantize)

    search = Search(model, cluster_of, batch, length, planned, bits)
    steps = "cuda_graphs" if decode == "auto" else decode
    arrangements = sorted(
        search.arrangements(steps, computed), key=lambda each: (not each.memory.fits, -each.tokens_per_second)
    )
    if not arrangements:
        raise UnsupportedModelError("; ".join(search.refusals))
    name = str(computed).removeprefix("torch.")
    notes = advice(arrangements, search)
    return Forecast(type(model).__name__, device, hosts, gpus_per_host, batch, length, name, arrangements, notes)


def _by_data_sheet(
    device: str, hosts: int, gpus_per_host: int, network: str, dtype: torch.dtype
) -> Callable[[int], Cluster]:
    chosen = named(DEVICES, device, "device", HERE)
    if dtype not in chosen.flops:
        known = ", ".join(str(each).removeprefix("torch.") for each in chosen.flops)
        raise ParallelError(f"dtype is {dtype}, and of a {device} the figures of {known} are known; give dtype")
    cluster = Cluster(chosen, hosts, gpus_per_host, LINKS[chosen.link], named(LINKS, network, "network"))
    return lambda ranks: cluster


def _here(hosts: int, ranks: int, decode: str, dtype: torch.dtype) -> Callable[[int], Cluster]:
    if hosts > 1 or decode not in ("auto", "eager"):
        raise ParallelError(f"device is {HERE!r}, which is one host and decode='eager'; leave hosts and decode out")
    probed = functools.cache(lambda count: probe_here(count, dtype))
    return lambda count: as_cluster(probed(count), probed(1), ranks, dtype)


_DECODE = ("auto", "eager", "cuda_graphs", "compile")
