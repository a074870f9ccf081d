"""The ways to lay a model out over a cluster that are worth a look."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from parallelformers_ng.errors import PlacementError, UnsupportedModelError
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.planner.arrangement import Arrangement, Memory, arrangement, memory_of
from parallelformers_ng.planner.devices import Cluster
from parallelformers_ng.planner.observation import Observation, observe
from parallelformers_ng.sharding.plan import ShardPlan

MOST_RANKS = 16
"""Ranks that share a layer, at most: with more of them exchanges are most of a step."""


class Search:
    """Lays a model out, and remembers what it saw on the way.

    Args:
        model: on any device.
        cluster_of: number of ranks that work at a time → where they do. The devices of a data sheet are not slower for
            that, and ranks that share a machine are.
        sequences: over all replicas.
        length: tokens of each.
        plan: number of ranks that share a layer, quantization → plan.
        quantize: weights to quantize, and how.

    Attributes:
        refusals: why some numbers of ranks cannot share a layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cluster_of: Callable[[int], Cluster],
        sequences: int,
        length: int,
        plan: Callable[[int, QuantizeOptions | None], ShardPlan],
        quantize: QuantizeOptions | None,
    ) -> None:
        self.model = model
        self.cluster_of = functools.cache(cluster_of)
        self.cluster = self.cluster_of(1)
        self.sequences = sequences
        self.length = length
        self.plan = functools.cache(plan)
        self.quantize = quantize
        self.refusals: list[str] = []
        self._total = self.cluster.hosts * self.cluster.devices
        self._observe = functools.cache(self._observed)

    def arrangements(self, decode: str, dtype: torch.dtype) -> Iterator[Arrangement]:
        """Yield one for each number of ranks that may share a layer: with as few stages as it fits in, as these work
        one after another, and as many replicas as there are devices for, and sequences."""
        for tensor in self.widths():
            try:
                pipeline, memory, seen = self.laid_out(tensor, self._total // tensor)
            except UnsupportedModelError as error:
                self.refusals.append(f"Not {tensor} ranks to a layer: {error}")
                continue
            replicas = self._replicas(tensor * pipeline)
            cluster = self.cluster_of(tensor * replicas)
            yield arrangement(cluster, seen, memory, dtype, decode, (tensor, pipeline, replicas), self.sequences)

    def widths(self) -> list[int]:
        """Return how many ranks may share a layer: so many that they lie within one host, or take whole hosts."""
        each = self.cluster.devices
        most = min(self._total, MOST_RANKS)
        counts = {1, 2, 4, 8, 16, each}
        return sorted(n for n in counts if n <= most and (each % n == 0 or n % each == 0))

    def laid_out(self, tensor: int, most: int) -> tuple[int, Memory, Observation]:
        """Return the fewest stages in which it fits, else as many as there may be; the memory of its fullest device."""
        plan, room = self.plan(tensor, self.quantize), self.cluster.device.usable
        pipeline = min(most, max(1, math.floor(max(plan.bytes_per_rank) / room)))
        while True:
            batch = math.ceil(self.sequences / self._replicas(tensor * pipeline))
            seen = self._observe(tensor, batch)
            try:
                memory = memory_of(self.model, plan, seen, pipeline, room)
            except PlacementError:  # the model has fewer parts
                pipeline = most = pipeline - 1
                continue
            if memory.fits or pipeline == most:
                return pipeline, memory, seen
            pipeline += 1

    def with_weights_in(self, bits: QuantizeOptions, best: Arrangement) -> Memory:
        """Return the memory of the fullest device of an arrangement, had the weights been quantized so."""
        plan, seen = self.plan(best.tensor, bits), self._observe(best.tensor, best.batch)
        return memory_of(self.model, plan, seen, best.pipeline, best.memory.room)

    def _replicas(self, devices: int) -> int:
        """Return how many models of so many devices each serve all sequences; none has more of them than the fullest
        must."""
        most = max(1, min(self._total // devices, self.sequences))
        return math.ceil(self.sequences / math.ceil(self.sequences / most))

    def _observed(self, tensor: int, batch: int) -> Observation:
        plan = self.plan(tensor, self.quantize)
        fullest = max(range(tensor), key=plan.bytes_per_rank.__getitem__)
        return observe(self.model, plan, fullest, batch, self.length)
