"""The places of each rank's shards in the memory files and files of a store."""

from __future__ import annotations

import mmap

from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan

_LINE = 64
_OWN_PAGES = 16 * mmap.PAGESIZE  # from this size on a tensor starts on a page, so that its pages can be freed alone


class Layout:
    """The layout of the shards of a plan: side by side, 64-byte aligned, large ones on pages of their own. It follows
    from the plan alone: parent and workers compute it, and only file descriptors cross.

    Region `r` below `world_size` belongs to rank r; the next one holds the tensors that all ranks share whole; the
    last ones are files, with what the plan leaves to the disk of each rank.

    Attributes:
        sizes: bytes of each region, `2 * world_size + 1` of them.
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
    """Return the region of a rank that is a file."""
    return plan.world_size + 1 + rank


def is_on_disk(plan: ShardPlan, tensor: TensorPlan, rank: int) -> bool:
    """Return whether the plan leaves a rank's part of a tensor to the disk."""
    return plan.tiers is not None and plan.tiers.place(tensor.storage, rank) == "disk"


def regions_of(plan: ShardPlan, rank: int) -> tuple[int, int, int]:
    """Return the regions that a rank maps: its own, the one that all share, and its file."""
    return rank, plan.world_size, file_region(plan, rank)
