"""Where each tensor's bytes lie in the memory that parent and workers share. A pure function of the plan, so that both
sides work it out for themselves and only file descriptors cross."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelformers_ng.sharding.plan import ShardPlan

_PAGE = 4096
_LINE = 64
_OWN_PAGES = 16 * _PAGE  # from this size on a tensor starts on a page, so that its pages can be given back alone


@dataclass
class Layout:
    """Offsets in bytes of every stored tensor.

    Region `r` below `world_size` belongs to rank r; the last one holds the tensors that all ranks share whole.

    Attributes:
        sizes: bytes of each region, `world_size + 1` of them.
        offsets: storage name → for each rank (region, offset).
    """

    sizes: list[int]
    offsets: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def lay_out(plan: ShardPlan) -> Layout:
    """Lay the shards of a plan side by side, 64-byte aligned, large ones on pages of their own."""
    layout = Layout(sizes=[0] * (plan.world_size + 1))
    for tensor in plan.stored():
        if tensor.is_replicated:
            place = _place(layout, plan.world_size, tensor.bytes_whole)
            layout.offsets[tensor.name] = [place] * plan.world_size
        else:
            ranks = range(plan.world_size)
            layout.offsets[tensor.name] = [_place(layout, rank, tensor.bytes_on(rank)) for rank in ranks]
    return layout


def _place(layout: Layout, region: int, size: int) -> tuple[int, int]:
    start = layout.sizes[region]
    step = _PAGE if size >= _OWN_PAGES else _LINE
    start = -(-start // step) * step
    end = start + size
    layout.sizes[region] = -(-end // _PAGE) * _PAGE if size >= _OWN_PAGES else end
    return region, start
