"""The shards in anonymous shared memory: written by the parent, mapped by the workers, gathered back at the end.

On CPU this memory *is* the shard: a worker maps it copy-on-write, so nothing is copied, a restarted worker finds the
weights as they were, and no worker can spoil another's.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from parallelformers_ng.checkpoint.layout import lay_out
from parallelformers_ng.checkpoint.nodes import Assembled, Leaf, Node
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.sharding.plan import ShardPlan, TensorPlan
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor

_TRIM_EVERY = 64 << 20  # bytes given up between two calls that hand the allocator's free pages back to the system


class ShardStore:
    """Holds every rank's shard in memfds: nothing has a name, nothing outlives the processes that map it.

    Args:
        plan: says what each rank holds.

    Raises:
        OSError: the system gives no memory (ENOSPC, ENOMEM); `write` raises it too.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self.layout = lay_out(plan)
        self.fds: list[int] = []
        try:
            for region, size in enumerate(self.layout.sizes):
                self.fds.append(os.memfd_create(f"shard-{region}", os.MFD_CLOEXEC))
                os.ftruncate(self.fds[-1], size)
        except OSError:
            self.close()
            raise

    def fds_for(self, rank: int) -> tuple[int, int]:
        """The two regions rank `rank` maps: its own and the shared one."""
        return self.fds[rank], self.fds[-1]

    def write(self, tensor: TensorPlan, whole: torch.Tensor) -> None:
        """Cut `whole` and write each rank's part. `pwrite` rather than a mapping: a full memory is ENOSPC, not
        SIGBUS."""
        places = self.layout.offsets[tensor.storage]
        written = set()
        for shard, place in zip(tensor.shards, places, strict=True):
            if shard.zero or place in written:  # fresh memory reads as zeros
                continue
            written.add(place)
            _write_all(self.fds[place[0]], shard.of(whole.detach()).to("cpu", tensor.dtype), place[1])

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        """Put one tensor together again, on CPU.

        Args:
            release: give its pages back as they are read, so that gathering never holds the model twice.
        """
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        done = set()
        for rank, (shard, place) in enumerate(zip(tensor.shards, self.layout.offsets[tensor.storage], strict=True)):
            size = tensor.bytes_on(rank)
            if shard.zero or place in done or size == 0:
                continue
            done.add(place)
            region, offset = place
            first_page = offset - offset % mmap.ALLOCATIONGRANULARITY
            with _Mapping(self.fds[region], first_page, offset + size - first_page) as mapping:
                flat = torch.frombuffer(
                    mapping, dtype=tensor.dtype, count=size // tensor.dtype.itemsize, offset=offset - first_page
                )
                shard.put(flat.view(shard.shape(tensor.shape)), whole)
                del flat
                if release and offset == first_page:
                    whole_pages = size - size % mmap.PAGESIZE
                    if whole_pages:
                        mapping.madvise(mmap.MADV_REMOVE, 0, whole_pages)
        return whole

    def node(self, tensor: TensorPlan) -> Node:
        """The same tensor to be read piece by piece, where it lies."""
        ranks = [0] if tensor.is_replicated else [rank for rank, shard in enumerate(tensor.shards) if not shard.zero]
        shapes = {rank: tensor.shards[rank].shape(tensor.shape) for rank in ranks}
        leaves = {rank: _StoreLeaf(shapes[rank], tensor.dtype, self, tensor, rank) for rank in ranks}
        return Assembled(tensor.shape, tensor.dtype, {rank: (tensor.shards[rank], leaves[rank]) for rank in ranks})

    def part(self, tensor: TensorPlan, rank: int) -> torch.Tensor:
        """One rank's part, mapped for as long as it is used."""
        shape, size = tensor.shards[rank].shape(tensor.shape), tensor.bytes_on(rank)
        if size == 0:
            return torch.empty(shape, dtype=tensor.dtype)
        region, offset = self.layout.offsets[tensor.storage][rank]
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(self.fds[region], skipped + size, access=mmap.ACCESS_COPY, offset=offset - skipped)
        count = size // tensor.dtype.itemsize
        return torch.frombuffer(mapping, dtype=tensor.dtype, count=count, offset=skipped).view(shape)

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


@dataclass(eq=False)
class _StoreLeaf(Leaf):
    store: ShardStore = field(repr=False)
    plan: TensorPlan
    rank: int

    def tensor(self) -> torch.Tensor:
        return self.store.part(self.plan, self.rank)


def map_shards(plan: ShardPlan, rank: int, own_fd: int, shared_fd: int) -> dict[str, torch.Tensor]:
    """In a worker: rank `rank`'s tensors as copy-on-write views of the parent's memory, storage name → tensor.

    The descriptors may be closed afterwards; the mappings live as long as the tensors.
    """
    layout = lay_out(plan)
    regions = {
        region: mmap.mmap(fd, layout.sizes[region], access=mmap.ACCESS_COPY)
        for region, fd in ((rank, own_fd), (plan.world_size, shared_fd))
        if layout.sizes[region]
    }
    held = {}
    for tensor in plan.stored():
        shape = tensor.shards[rank].shape(tensor.shape)
        region, offset = layout.offsets[tensor.name][rank]
        size = tensor.bytes_on(rank)
        if size == 0:
            held[tensor.name] = torch.empty(shape, dtype=tensor.dtype)
        else:
            count = size // tensor.dtype.itemsize
            held[tensor.name] = torch.frombuffer(regions[region], dtype=tensor.dtype, count=count, offset=offset).view(
                shape
            )
    return held


def hand_over(model: nn.Module, store: ShardStore, progress: Progress | None = None) -> None:
    """Write every tensor of `model` to the store and give up the model's own copy as soon as it is written.

    Afterwards the model's tensors are on `meta`, with the shapes and data types that the ranks hold together.

    Raises:
        OSError: the memory gave out; what had been given up is back in the model.
    """
    given_up: list[str] = []
    pending = 0
    try:
        for names in names_of_each(model, store.plan):
            plans = [store.plan.tensors[name] for name in names]
            whole = get_tensor(model, names[0], plans[0].is_buffer)
            for plan in plans:
                if plan.storage == plan.name:
                    store.write(plan, whole)
            place(model, names, store.plan, torch.empty(whole.shape, dtype=plans[0].dtype, device="meta"))
            given_up += names
            del whole
            pending += plans[0].bytes_whole
            if pending >= _TRIM_EVERY:
                pending = _trim()
            if progress is not None:
                progress(plans[0].bytes_whole)
    except BaseException:
        take_back(model, store.plan, store, given_up)
        raise
    _trim()


def take_back(
    model: nn.Module,
    plan: ShardPlan,
    source: ShardSource,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Gather the tensors back into the model, on CPU; tied parameters are tied again. The source is spent
    afterwards."""
    for group in names_of_each(model, plan, names):
        # Of tied tensors that are cut differently any one can rebuild the whole; all but the first are let go.
        tensor = plan.tensors[group[0]]
        place(model, group, plan, source.read(tensor, release=tensor.storage in group))
        if progress is not None:
            progress(tensor.bytes_whole)


def names_of_each(model: nn.Module, plan: ShardPlan, names: Iterable[str] | None = None) -> list[list[str]]:
    """The names of each tensor of `model`, several where it is tied; of all that the plan has, or of `names` alone."""
    wanted = set(plan.tensors if names is None else names)
    together: dict[int, list[str]] = {}
    for name, tensor in plan.tensors.items():
        if name in wanted:
            together.setdefault(id(get_tensor(model, name, tensor.is_buffer)), []).append(name)
    return list(together.values())


def place(model: nn.Module, names: list[str], plan: ShardPlan, tensor: torch.Tensor) -> None:
    """Put one tensor under all of its names, as one parameter, so that ties stay ties and `requires_grad` what it
    was."""
    first = plan.tensors[names[0]]
    if not first.is_buffer:
        tensor = nn.Parameter(tensor, requires_grad=get_tensor(model, first.name, False).requires_grad)
    for name in names:
        set_tensor(model, name, tensor, first.is_buffer)


def _write_all(fd: int, tensor: torch.Tensor, offset: int) -> None:
    if tensor.numel() == 0:
        return
    view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    while view:
        count = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[count:], offset + count


class ShardSource(Protocol):
    """Where whole tensors can be put together again from the ranks' parts."""

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor: ...


class _Mapping(mmap.mmap):
    """A writable mapping of part of a memfd that is closed on leaving, whatever still refers to it then fails
    loudly."""

    def __new__(cls, fd: int, offset: int, length: int) -> _Mapping:
        return super().__new__(cls, fd, length, offset=offset)


def _trim() -> int:
    """Hand freed heap pages back to the system; without it, glibc may keep what the model's small tensors leave."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no malloc_trim, and needs none
        ctypes.CDLL(None).malloc_trim(0)
    return 0
