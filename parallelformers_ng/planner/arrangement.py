"""One way to lay a model out over a cluster: the memory of its devices, and the time of its passes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelformers_ng.planner.devices import Cluster
from parallelformers_ng.planner.observation import Observation, Pass, Work
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.placed import Placed
from parallelformers_ng.sharding.plan import ShardPlan


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
    """tensor × pipeline × replicas, and what they give.

    Attributes:
        tensor: ranks that share each layer.
        pipeline: number of stages; one rank of them computes at a time.
        replicas: models that work side by side.
        sequences: sequences of all replicas.
        memory: memory of the fullest device.
        prompt_seconds: until all prompts of a replica are read.
        step_seconds: seconds of a decode step, at the full length.
        exchange_seconds: seconds of the exchanges between ranks in a step.
        exchanges: exchanges of a rank in a step.
    """

    tensor: int
    pipeline: int
    replicas: int
    sequences: int
    memory: Memory
    prompt_seconds: float
    step_seconds: float
    exchange_seconds: float
    exchanges: int

    def __str__(self) -> str:
        return f"{self.tensor} × {self.pipeline} × {self.replicas}"

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    @property
    def tokens_per_second(self) -> float:
        """Decoded, of all sequences."""
        return self.sequences / self.step_seconds

    @property
    def batch(self) -> int:
        """Sequences of the replica that has most."""
        return math.ceil(self.sequences / self.replicas)

    @property
    def exchange_share(self) -> float:
        """Return the fraction of a decode step that is exchanges, between 0 and 1."""
        return self.exchange_seconds / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "replicas": self.replicas,
            "batch_per_replica": self.batch,
            "fits": self.memory.fits,
            "bytes": {name: round(size) for name, size in vars(self.memory).items()},
            "prompt_seconds": self.prompt_seconds,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "exchanges": self.exchanges,
            "exchange_share": self.exchange_share,
        }


def memory_of(model: nn.Module, plan: ShardPlan, seen: Observation, stages: int, room: float) -> Memory:
    """Return the memory of the fullest device, for a plan of one stage's ranks laid out over stages.

    Raises:
        PlacementError: the model has fewer parts than there are stages.
    """
    if stages == 1:
        return Memory(max(plan.bytes_per_rank), sum(seen.caches.values()), seen.prompt.peak, room)
    staged = in_stages(plan, model, [1 / stages] * stages)
    first = {layer.path: layer.attributes[0]["stop"].holders[0] for layer in staged.layers if layer.cls is Placed}
    caches = [0.0] * staged.world_size
    for unit, size in seen.caches.items():
        for rank in range(first.get(unit, 0), first.get(unit, 0) + plan.world_size):
            caches[rank] += size
    fullest = max(zip(staged.bytes_per_rank, caches, strict=True), key=sum)
    return Memory(*fullest, seen.prompt.peak, room)


def arrangement(
    cluster: Cluster,
    seen: Observation,
    memory: Memory,
    dtype: torch.dtype,
    decode: str,
    ways: tuple[int, int, int],
    sequences: int,
) -> Arrangement:
    """Estimate the speed of an arrangement from the observation of one rank.

    Args:
        memory: memory of the fullest device.
        dtype: data type of the computation.
        decode: "eager", "cuda_graphs" or "compile", as in `parallelize`.
        ways: tensor, pipeline, replicas.
        sequences: sequences of all replicas.
    """
    tensor, pipeline, replicas = ways

    def seconds(what: Pass, kind: str) -> tuple[float, float]:
        exchanges: list[tuple[int, float, bool]] = [
            (tensor, work.exchanged, work.gathers) for work in what.work if work.exchanged
        ]
        if pipeline > 1:  # all ranks get what the last unit of a stage gives
            between = [statistics.median(what.sizes)] * (pipeline - 1)
            exchanges += [(tensor * pipeline, size, True) for size in (*between, what.sizes[-1])]
        exchanged = sum(cluster.exchange_seconds(*each) for each in exchanges)
        return exchanged + compute_seconds(cluster, what.work, dtype, kind), exchanged

    prompt, _ = seconds(seen.prompt, "eager")
    step, exchanged = seconds(seen.step, decode)
    step += cluster.device.step_seconds
    exchanges = (seen.step.exchanges if tensor > 1 else 0) + (pipeline if pipeline > 1 else 0)
    return Arrangement(tensor, pipeline, replicas, sequences, memory, prompt, step, exchanged, exchanges)


def compute_seconds(cluster: Cluster, works: Sequence[Work], dtype: torch.dtype, decode: str) -> float:
    """Return a device's seconds for the operators of a pass, one after another. Each takes a least time, and the
    longer of moving its bytes and doing its arithmetic (the roofline model, Williams et al. 2009)."""
    device = cluster.device
    at_once = device.layer_seconds is not None
    computes = device.flops[dtype] * device.flops_share

    def seconds(work: Work) -> float:
        bandwidth = device.layer_bandwidth if at_once and work.native else device.bandwidth
        return max(work.moved / (bandwidth * device.read_share), work.flops / computes)

    operators = [work for work in works if not work.exchanged]
    if decode == "compile":
        operators = fused(works)
    busy = sum(seconds(work) for work in operators)
    if at_once:
        busy += len({work.unit for work in operators if work.native}) * (device.layer_seconds or 0.0)
        operators = [work for work in operators if not work.native]
    busy += len(operators) * device.operator_seconds
    return max(busy, len(operators) * device.host_seconds) if decode == "eager" else busy


def fused(works: Sequence[Work]) -> list[Work]:
    """Fuse operators as a compiler does: operators between two products become one, with the bytes of the largest."""
    kernels: list[Work] = []
    open_ = False
    for work in works:
        if work.exchanged:
            open_ = False
        elif work.fuses and open_:
            kernels[-1] = max(kernels[-1], work, key=lambda each: each.moved)
        else:
            kernels.append(work)
            open_ = work.fuses
    return kernels
