"""The shards in anonymous shared memory: written by the parent, mapped by the workers, gathered back at the end.

On CPU this memory *is* the shard: a worker maps it copy-on-write, so nothing is copied, a restarted worker finds the
weights as they were, and no worker can spoil another's.
"""

from __future__ import annotations

import errno
import functools
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from parallelformers_ng.checkpoint.encoded import held_nodes, whole_node
from parallelformers_ng.checkpoint.layout import Layout, regions_of
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.mapping import map_file
from parallelformers_ng.checkpoint.nodes import FetchedLeaf, Node, of_ranks
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.reading import read, read_copy
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.runtime.freed_memory import TRIM_EVERY, give_back_freed
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan, bytes_of
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor
from parallelformers_ng.sharding.wording import human_bytes


class ShardStore:
    """Holds every rank's shard in memfds, and in files without a name what the plan leaves to the disk: none of it
    outlives the processes that map it. A store that is dropped closes them.

    Args:
        plan: says what each rank holds.

    Raises:
        OSError: the system gives no memory (ENOMEM), or no such large file (EFBIG); `write` raises it too.
        ParallelError: the disk has no room.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self.layout = Layout(plan.held)
        self.fds: list[int] = []
        self._room = 0  # bytes that may be written before the system is asked again what it has left
        weakref.finalize(self, _close_all, self.fds).atexit = False
        try:
            for region, size in enumerate(self.layout.sizes):
                if size and region > plan.world_size:
                    assert plan.tiers is not None
                    assert plan.tiers.folder is not None, "what has no folder is not left to the disk"
                    self.fds.append(_file_in(plan.tiers.folder, size))
                    continue
                self.fds.append(os.memfd_create(f"shard-{region}", os.MFD_CLOEXEC))
                os.ftruncate(self.fds[-1], size)
        except (OSError, ParallelError):
            self.close()
            raise

    def fds_for(self, rank: int) -> list[int]:
        """Return the regions rank `rank` maps, see `map_shards`."""
        return [self.fds[region] for region in regions_of(self.plan, rank)]

    def settle(self) -> None:
        """See that what was written to files is on the disk, and no longer in memory."""
        for fd in self.fds[self.plan.world_size + 1 :]:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def write(self, tensor: TensorPlan, whole: torch.Tensor) -> None:
        """Encode and cut `whole`, and write each rank's part."""
        node = (
            whole.node
            if isinstance(whole, LazyTensor)
            else FetchedLeaf(tuple(whole.shape), whole.dtype, whole.detach, tensor.name)
        )
        self.take(tensor, node)

    def take(self, tensor: TensorPlan, node: Node) -> None:
        """The same of a tensor that may be stored as ranks hold it."""
        for part, shard in zip(
            self.plan.parts(tensor.name), held_nodes(self.plan, tensor.name, node).values(), strict=True
        ):
            self._write(part, read(shard, {}))

    def _write(self, tensor: TensorPlan, whole: torch.Tensor) -> None:
        """Write the parts of what is held under one name. Memory files have no limit: beyond what the system has, it
        would end processes, so that is asked first."""
        places = self.layout.offsets[tensor.storage]
        for (region, offset), shard in dict(zip(places, tensor.shards, strict=True)).items():
            if not shard.zero:  # fresh memory reads as zeros
                if region <= self.plan.world_size:
                    self._take_room(bytes_of(shard.shape(tensor.shape), tensor.dtype))
                _write_all(self.fds[region], shard.of(whole).to("cpu", tensor.dtype), offset)

    def _take_room(self, size: int) -> None:
        if size > self._room:
            available = available_memory()
            if size > available:
                raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)} ({human_bytes(available)} are left)")
            self._room = max(size, available // 2)  # what others take meanwhile is seen the next time
        self._room -= size

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        """Put one tensor together again, on CPU.

        Args:
            release: give its pages back afterwards, so that gathering never holds the model twice.
        """
        whole = read_copy(self.node(tensor), {})
        for part in self.plan.parts(tensor.name) if release else ():
            for rank, (region, offset) in enumerate(self.layout.offsets[part.storage]):
                pages = part.bytes_on(rank) // mmap.PAGESIZE * mmap.PAGESIZE
                if pages and offset % mmap.PAGESIZE == 0 and region <= self.plan.world_size:
                    with mmap.mmap(self.fds[region], pages, offset=offset) as mapping:
                        mapping.madvise(mmap.MADV_REMOVE)
        return whole

    def node(self, tensor: TensorPlan) -> Node:
        """Return one tensor, to be read in parts."""
        return whole_node(self.plan, tensor, lambda part: of_ranks(part, functools.partial(self.part, part)))

    def part(self, tensor: TensorPlan, rank: int) -> torch.Tensor:
        """Return one rank's part of the weights, mapped while it is used."""
        region, offset = self.layout.offsets[tensor.storage][rank]
        skipped, size = offset % mmap.PAGESIZE, tensor.bytes_on(rank)
        if size == 0:
            return _part(tensor, rank, None, 0)
        mapping = mmap.mmap(self.fds[region], skipped + size, access=mmap.ACCESS_COPY, offset=offset - skipped)
        return _part(tensor, rank, mapping, skipped)

    def close(self) -> None:
        _close_all(self.fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _file_in(folder: str, size: int) -> int:
    """Return a file in a folder that has no name there, so that it goes when nobody has it open any more."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            free = human_bytes(shutil.disk_usage(folder).free)
            raise ParallelError(
                f"fit: offload_folder {folder} has {free} of room, and a rank needs {human_bytes(size)} there:"
                f" {error.strerror}; the model is as it was"
            ) from error
        return os.dup(file.fileno())


def map_shards(plan: ShardPlan, rank: int, fds: Sequence[int]) -> dict[str, torch.Tensor]:
    """In a worker: rank `rank`'s tensors as copy-on-write views of the parent's memory, storage name → tensor.

    The descriptors may be closed afterwards; the mappings live as long as the tensors.

    Args:
        fds: descriptors of its own region, of the shared one, and of the file.
    """
    layout = Layout(plan)
    mappings = {
        region: map_file(fd, layout.sizes[region])
        for region, fd in zip(regions_of(plan, rank), fds, strict=True)
        if layout.sizes[region]
    }
    shards = {}
    for tensor in plan.stored():
        region, offset = layout.offsets[tensor.name][rank]
        shards[tensor.name] = _part(tensor, rank, mappings.get(region), offset)
    return shards


def _part(tensor: TensorPlan, rank: int, mapping: mmap.mmap | None, offset: int) -> torch.Tensor:
    """Return a rank's part of a tensor, as a view of a mapping; of memory of its own if it has no bytes."""
    shape = tensor.shards[rank].shape(tensor.shape)
    if mapping is None or 0 in shape:
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")
    return torch.frombuffer(mapping, dtype=tensor.dtype, count=math.prod(shape), offset=offset).view(shape)


def hand_over(model: nn.Module, store: ShardStore, which: Iterable[str], progress: Progress | None = None) -> None:
    """Write tensors of `model` to the store and give up the model's own copies as soon as they are written.

    Afterwards the model's tensors are on `meta`, with the shapes and data types that the ranks hold together.

    Raises:
        OSError: the memory gave out; what had been given up is back in the model.
    """
    given_up: list[str] = []
    pending = 0
    try:
        for names in names_of_each(model, store.plan, which):
            plans = [store.plan.tensors[name] for name in names]
            whole = get_tensor(model, names[0], plans[0].is_buffer)
            for plan in plans:
                if plan.storage == plan.name:
                    store.write(plan, whole)
            place(model, names, store.plan, torch.empty(whole.shape, dtype=plans[0].dtype, device="meta"))
            given_up += names
            del whole
            pending += plans[0].bytes_whole
            if pending >= TRIM_EVERY:
                give_back_freed()
                pending = 0
            if progress is not None:
                progress(store.plan.bytes_held(names[0]))
    except BaseException:
        take_back(model, store.plan, store.read, given_up)
        raise
    give_back_freed()


def take_back(
    model: nn.Module,
    plan: ShardPlan,
    read: Callable[[TensorPlan, bool], torch.Tensor],
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Gather the tensors back into the model, on CPU; tied parameters are tied again.

    Args:
        read: gives a tensor, whole; the second argument says whether it may then be let go where it was.
        names: names of the tensors; all by default.
    """
    for group in names_of_each(model, plan, names):
        # Of tied tensors that are cut differently any one can rebuild the whole; all but the first are let go.
        tensor = plan.tensors[group[0]]
        place(model, group, plan, read(tensor, tensor.storage in group))
        if progress is not None:
            progress(plan.bytes_held(tensor.name))


def names_of_each(model: nn.Module, plan: ShardPlan, names: Iterable[str] | None = None) -> list[list[str]]:
    """Return the names of each tensor of `model`, several where it is tied; of all that the plan has, or of `names`
    alone."""
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
