"""Keeps shards in anonymous shared memory, which the parent writes, the workers map, and the parent gathers again.

A CPU worker computes directly with the mapped memory, without a copy. The memory is mapped copy-on-write, so no worker
can change the shards of another worker, and a restarted worker maps unchanged weights.
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

from parallelformers_ng.checkpoint.encoded import stored_nodes, whole_node
from parallelformers_ng.checkpoint.identity import SharedMemory, become
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.mapping import Mapping, map_file
from parallelformers_ng.checkpoint.nodes import Node, leaf_of, of_ranks
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.reading import read, read_copy
from parallelformers_ng.checkpoint.writing import bytes_of_tensor
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.runtime.freed_memory import TRIM_EVERY, give_back_freed
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan, bytes_of
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor
from parallelformers_ng.sharding.wording import human_bytes
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_LINE = 64
_OWN_PAGES = 16 * mmap.PAGESIZE  # larger shards have pages of their own, so that they can be freed
Read = Callable[[TensorPlan, bool], torch.Tensor]


class Layout:
    """Positions of all shards of a plan in the files of a `ShardStore`, which are called regions.

    A layout depends only on the plan. The caller and the workers each compute the layout, so the caller sends only file
    descriptors. Shards are 64-byte aligned. Shards of at least 16 pages (64 KiB) share no page with other shards.

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
            tiers = [plan.tiers and plan.tiers.place(tensor.storage, rank) for rank in ranks]
            regions = [disk_region(plan, rank) if tiers[rank] == "disk" else rank for rank in ranks]
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


def disk_region(plan: ShardPlan, rank: int) -> int:
    return plan.world_size + 1 + rank


def regions_of(plan: ShardPlan, rank: int) -> tuple[int, int, int]:
    """Return the numbers of the regions that a rank maps: its memory file, the replicated tensors, its disk file."""
    return rank, plan.world_size, disk_region(plan, rank)


class ShardStore:
    """The shards of all ranks, in memory files (memfd) and, for shards offloaded to disk, in unnamed disk files.

    The system frees a file when no process has it open or mapped. A store closes its files when it is
    garbage-collected.

    Attributes:
        fds: file descriptor of each region of the layout; empty after `close`.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self.layout = Layout(plan.as_stored)
        self.fds: list[int] = []
        self._room = 0  # bytes that may be written before `_take_room` checks the system's free memory again
        weakref.finalize(self, _close_all, self.fds).atexit = False
        try:
            for region, size in enumerate(self.layout.sizes):
                if size and region > plan.world_size:
                    assert plan.tiers is not None
                    assert plan.tiers.folder is not None, "shards are on disk without an offload folder"
                    self.fds.append(_file_in(plan.tiers.folder, size))
                    continue
                self.fds.append(os.memfd_create(f"shard-{region}", os.MFD_CLOEXEC))
                os.ftruncate(self.fds[-1], size)
        except (OSError, ParallelError):
            self.close()
            raise

    def fds_for(self, rank: int) -> list[int]:
        return [self.fds[region] for region in regions_of(self.plan, rank)]

    def settle(self) -> None:
        """Flush the disk files to the disk, and free the memory that they use in the page cache."""
        for fd in self.fds[self.plan.world_size + 1 :]:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def write(self, tensor: TensorPlan, node: Node) -> None:
        """Read a tensor, quantize and shard it as the plan says, and write each rank's shard."""
        nodes = stored_nodes(self.plan, tensor.name, node).values()
        for part, stored in zip(self.plan.parts(tensor.name), nodes, strict=True):
            self._write(part, read(stored, {}))

    def _write(self, tensor: TensorPlan, whole: torch.Tensor) -> None:
        places = self.layout.offsets[tensor.storage]
        for (region, offset), shard in dict(zip(places, tensor.shards, strict=True)).items():
            if not shard.zero:  # a shard of zeros need not be written, because new files read as zeros
                if region <= self.plan.world_size:
                    self._take_room(bytes_of(shard.shape(tensor.shape), tensor.dtype))
                _write_all(self.fds[region], shard.of(whole).to("cpu", tensor.dtype), offset)

    def _take_room(self, size: int) -> None:
        if size > self._room:
            available = available_memory()
            if size > available:  # raise an error, because otherwise the kernel would kill processes (OOM)
                raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)} ({human_bytes(available)} are left)")
            self._room = max(size, available // 2)  # half, because other processes need memory meanwhile
        self._room -= size

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        """Gather a whole tensor of the model, on CPU; a quantized tensor is dequantized.

        Args:
            release: whether to free the memory of its shards afterwards, so that gathering a model does not need memory
                for two copies. Freed shards read as zeros; small shards and shards on disk are kept.
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
        return whole_node(self.plan, tensor, lambda part: of_ranks(part, functools.partial(self.part, part)))

    def part(self, tensor: TensorPlan, rank: int) -> torch.Tensor:
        """Return one rank's shard of a stored tensor, as a copy-on-write mapping that lives as long as the result."""
        region, offset = self.layout.offsets[tensor.storage][rank]
        skipped, size = offset % mmap.PAGESIZE, tensor.bytes_on(rank)
        if size == 0:
            return _part(tensor, rank, None, 0)
        mapping = mmap.mmap(self.fds[region], skipped + size, access=mmap.ACCESS_COPY, offset=offset - skipped)
        return _part(tensor, rank, mapping, skipped)

    def close(self) -> None:
        """Close the files. Memory that is mapped from the files stays valid."""
        _close_all(self.fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _file_in(folder: str, size: int) -> int:
    """Create an unnamed file in a folder, and return its descriptor. The system deletes the file after its last use."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise_if_of_handler(error)
            free = human_bytes(shutil.disk_usage(folder).free)
            raise ParallelError(
                f"fit: offload_folder {folder} has {free} of free space, and a rank needs {human_bytes(size)} there:"
                f" {error.strerror}; the model is unchanged"
            ) from error
        return os.dup(file.fileno())


def map_shards(plan: ShardPlan, rank: int, fds: Sequence[int]) -> dict[str, torch.Tensor]:
    """Map a rank's shards in its worker: storage name → copy-on-write view. `fds` is from `ShardStore.fds_for`."""
    layout = Layout(plan)
    regions = zip(regions_of(plan, rank), fds, strict=True)
    mappings = {region: map_file(fd, size) for region, fd in regions if (size := layout.sizes[region])}
    shards = {}
    for tensor in plan.stored():
        region, offset = layout.offsets[tensor.name][rank]
        shards[tensor.name] = _part(tensor, rank, mappings.get(region), offset)
    return shards


def _part(tensor: TensorPlan, rank: int, mapping: Mapping | mmap.mmap | None, offset: int) -> torch.Tensor:
    shape = tensor.shards[rank].shape(tensor.shape)
    if mapping is None or 0 in shape:
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")
    return torch.frombuffer(mapping, dtype=tensor.dtype, count=math.prod(shape), offset=offset).view(shape)


def hand_over(
    model: nn.Module, store: ShardStore, which: Iterable[str], progress: Progress | None = None, copy: bool = False
) -> None:
    """Move the tensors `which` of a model to a store, one at a time, so that memory never holds the model twice.

    Afterwards these tensors of the model are on `meta`, with their whole shapes and the data types of the plan. With
    `copy`, they stay. If an error occurs, the model gets the moved tensors back, on CPU.
    """
    moved_names: list[str] = []
    pending, shared = 0, SharedMemory(model)
    try:
        for names in names_of_each(model, store.plan, which):
            plans = [store.plan.tensors[name] for name in names]
            whole = get_tensor(model, names[0], plans[0].is_buffer)
            is_shared = not copy and shared.has(whole)
            node = whole.node if isinstance(whole, LazyTensor) else leaf_of(whole)
            for plan in plans:
                if plan.storage == plan.name:
                    store.write(plan, node)
            if not copy:
                nothing = torch.empty(whole.shape, dtype=plans[0].dtype, device="meta")
                place(model, names, store.plan, nothing, is_shared)
                moved_names += names
            del whole, node
            pending += plans[0].bytes_whole
            if pending >= TRIM_EVERY:
                give_back_freed()
                pending = 0
            if progress is not None:
                progress(store.plan.bytes_held(names[0]))
    except BaseException:
        take_back(model, store.plan, store.read, moved_names)
        raise
    give_back_freed()


def take_back(
    model: nn.Module, plan: ShardPlan, read: Read, names: Iterable[str] | None = None, progress: Progress | None = None
) -> None:
    """Gather tensors from ranks or from a store into the model, on CPU. Tied parameters stay tied.

    Args:
        read: function that returns a whole tensor; its second argument says whether the source may free the tensor.
    """
    for group in names_of_each(model, plan, names):
        # The names of a tied tensor may have different shards, but the same values, so the first name suffices.
        tensor = plan.tensors[group[0]]
        place(model, group, plan, read(tensor, tensor.storage in group))
        if progress is not None:
            progress(plan.bytes_held(tensor.name))


def names_of_each(model: nn.Module, plan: ShardPlan, names: Iterable[str] | None = None) -> list[list[str]]:
    """Return one list of names for each tensor of a model; a tied tensor has several names."""
    wanted = set(plan.tensors if names is None else names)
    together: dict[int, list[str]] = {}
    for name, tensor in plan.tensors.items():
        if name in wanted:
            together.setdefault(id(get_tensor(model, name, tensor.is_buffer)), []).append(name)
    return list(together.values())


def place(model: nn.Module, names: list[str], plan: ShardPlan, new: torch.Tensor, keeps_values: bool = False) -> None:
    """Give the tensor of the model that has the given names (several if it is tied) the content of `new`. The tensor
    stays the same object if possible; `identity.become` says how."""
    first = plan.tensors[names[0]]
    current = get_tensor(model, first.name, first.is_buffer)
    if not first.is_buffer:
        new = nn.Parameter(new, requires_grad=current.requires_grad)
    try:
        become(current, new, keeps_values)
    except RuntimeError:
        for name in names:
            set_tensor(model, name, new, first.is_buffer)


def _write_all(fd: int, tensor: torch.Tensor, offset: int) -> None:
    view = memoryview(bytes_of_tensor(tensor))
    while view:
        count = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[count:], offset + count
