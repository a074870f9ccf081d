"""Computes where each rank's shards are in the memory files and disk files of a `ShardStore`."""

from __future__ import annotations

import mmap

from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan

_LINE = 64
_OWN_PAGES = 16 * mmap.PAGESIZE  # a shard of this size or more starts on a page, so that its pages can be freed alone


class Layout:
    """Region and offset of every shard of a plan. Shards are 64-byte aligned; large shards have their own pages.

    A layout depends only on the plan. Parent and workers each compute the layout, so the parent sends only file
    descriptors. A shard is large from 16 pages on (64 KiB with pages of 4 KiB).

    Regions 0 to `world_size - 1` are memory files, one for the shards of each rank. Region `world_size` is a memory
    file with the replicated tensors that no rank offloads to disk. Regions `world_size + 1` to `2 * world_size` are
    disk files, one for the offloaded shards of each rank.

    Attributes:
        sizes: size of each region in bytes; `2 * world_size + 1` numbers.
        offsets: storage name → for each rank (region, offset in bytes).
    """

    def __init__(self, plan: ShardPlan) -> None:
        ranks = range(plan.world_size)
        self.sizes = [0] * (2 * plan.world_size + 1)
        self.offsets: dict[str, list[tuple[int, int]]] = {}
        for tensor in plan.stored():
            regions = [file_region(plan, rank) if is_on_disk(plan, tensor, rank) else rank for rank in ranks]
            if tensor.is_replicated and regions == list(ranks):
                places = [self._place(plan.world_size, tensor.bytes_whole)] * plan.world_size
            else:
                places = [self._place(regions[rank], tensor.bytes_on(rank)) for rank in ranks]
            self.offsets[tensor.name] = places

    def _place(self, region: int, size: int) -> tuple[int, int]:
        step = mmap.PAGESIZE if size >= _OWN_PAGES else _LINE
        start = -(-self.sizes[region] // step) * step
        end = start + size
        self.sizes[region] = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE if size >= _OWN_PAGES else end
        return region, start


def file_region(plan: ShardPlan, rank: int) -> int:
    return plan.world_size + 1 + rank


def is_on_disk(plan: ShardPlan, tensor: TensorPlan, rank: int) -> bool:
    return plan.tiers is not None and plan.tiers.place(tensor.storage, rank) == "disk"


def regions_of(plan: ShardPlan, rank: int) -> tuple[int, int, int]:
    """Return the regions that a rank maps: its memory file, the shared memory file, and its disk file."""
    return rank, plan.world_size, file_region(plan, rank)
