"""Puts tensors together again from where the workers have them: their files, or their devices."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parallelformers_ng.checkpoint.nodes import Assembled, Leaf, Node
from parallelformers_ng.checkpoint.source import Checkpoint
from parallelformers_ng.checkpoint.store import ShardSource
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.plan import Shard, ShardPlan, TensorPlan


class FilesAnd:
    """Reads what a checkpoint holds from its files, and the rest from where the deployment keeps it."""

    def __init__(self, checkpoint: Checkpoint, rest: ShardSource) -> None:
        self._checkpoint = checkpoint
        self._rest = rest

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        in_files = tensor.storage in self._checkpoint.nodes
        return self._checkpoint.read(tensor) if in_files else self._rest.read(tensor, release)


class WorkerShards:
    """Reads tensors back from the ranks themselves: on CUDA the devices hold the only copy."""

    def __init__(self, plan: ShardPlan, group: WorkerGroup) -> None:
        self._plan = plan
        self._group = group

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard, part in zip(tensor.shards, self.parts(tensor), strict=True):
            shard.put(part, whole)
        return whole

    def parts(self, tensor: TensorPlan) -> list[torch.Tensor]:
        """Every rank's part."""
        exported = self._group.call_each("export", [([tensor.storage],)] * self._plan.world_size)
        return [part for (part,) in exported]

    def node(self, tensor: TensorPlan) -> Node:
        """The same tensor to be read piece by piece; the parts are fetched once while the node lives."""
        fetched: list[torch.Tensor] = []
        ranks = [0] if tensor.is_replicated else [rank for rank, shard in enumerate(tensor.shards) if not shard.zero]
        parts: dict[int, tuple[Shard, Node]] = {}
        for rank in ranks:
            shape = tensor.shards[rank].shape(tensor.shape)
            parts[rank] = tensor.shards[rank], _WorkerLeaf(shape, tensor.dtype, self, tensor, rank, fetched)
        return Assembled(tensor.shape, tensor.dtype, parts)


@dataclass(eq=False)
class _WorkerLeaf(Leaf):
    shards: WorkerShards = field(repr=False)
    plan: TensorPlan
    rank: int
    fetched: list[torch.Tensor] = field(repr=False)

    def tensor(self) -> torch.Tensor:
        if not self.fetched:
            self.fetched += self.shards.parts(self.plan)
        return self.fetched[self.rank]

    def release(self) -> None:
        self.fetched.clear()
