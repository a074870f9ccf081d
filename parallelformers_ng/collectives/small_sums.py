"""Sums small tensors of CUDA ranks on one host by a kernel of torch that reads the memory of the other devices.

They ran on ranks that share one card, never on two cards. The files named here are in
`torch/csrc/distributed/c10d/symm_mem/` of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._symmetric_memory import _SymmetricMemory
from torch.distributed.distributed_c10d import _register_process_group, _unregister_process_group

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.shared_result import agreed

MAX_BYTES = 256 * 1024  # NCCL sums tensors of this many bytes or more
TRIAL_SECONDS = 5.0  # a trial that takes longer has failed, as has an exchange of memory handles
_TYPES = (torch.bfloat16, torch.float32)  # the types that torch's kernel is compiled for (CUDASymmetricMemoryOps.cu)
_LOAD_BYTES = 16  # each thread of the kernel loads 16 bytes at a time (`get_and_verify_alignment`)
_MAX_BLOCKS = 24  # the kernel has at most 24 thread blocks (`one_shot_all_reduce_max_num_blocks`)
_MIN_CAPABILITY = (8, 0)  # on older devices the kernel fails (`add_bf16x2` of CUDASymmetricMemory-inl.cuh)
_SOCKET_FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # torch makes a socket in one of them (`IpcChannel`)
_MAX_PATH_BYTES = 107  # longest path of a socket; torch's `IpcChannel` copies longer paths beyond its buffer
_LOOK_SECONDS, _RELEASE_SECONDS = 0.02, 0.0005
log = logging.getLogger("parallelformers_ng")
_numbers = itertools.count()


class SmallSums:
    """An all-reduce of small CUDA tensors, through buffers that the devices of all ranks can read.

    A sum copies the rank's tensor to its buffer. Then a kernel waits until all ranks have copied, adds the ranks'
    buffers, and waits until all ranks have read (`one_shot_all_reduce_out` of `CUDASymmetricMemoryOps.cu`). The kernel
    adds in rank order, so all ranks get the same bits, and adds 16-bit floats in 16 bits (`load_and_reduce` and
    `add_bf16x2` of `CUDASymmetricMemory-inl.cuh`). `one_shot_all_reduce_copy` would copy inside the kernel, but signals
    the other ranks before all threads of a block have copied.

    The kernel waits without a time limit, and no abort of NCCL ends it (`sync_remote_blocks`). So a thread of this
    object writes the signals that the kernel waits for, after an abort or when the time of `limit` is over. Results are
    then wrong: see `Communicator.why_void`.

    The memory comes from `empty_strided_p2p`, which zeroes the signals (`CUDASymmetricMemoryAllocator::alloc`). The
    pool of `symm_mem.empty` could reuse memory with old signals.
    """

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, device: torch.device, is_aborted: Callable[[], bool]
    ) -> None:
        self._rank = rank
        self._device = device
        self._is_aborted = is_aborted
        self._name = cast(Any, f"parallelformers_ng small sums {next(_numbers)}")  # some stubs want a `GroupName`
        self._deadline = math.inf
        self._has_released = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        store = store.clone()  # type: ignore[attr-defined]  # missing from the stub
        store.set_timeout(timedelta(seconds=TRIAL_SECONDS))
        group = dist.ProcessGroup(dist.PrefixStore("small sums", store), rank, world_size)
        _register_process_group(self._name, group)
        try:
            buffer = _SymmetricMemory.empty_strided_p2p((MAX_BYTES,), [1], torch.uint8, device)
            handle = _SymmetricMemory.rendezvous(buffer, self._name)
            shape = (_MAX_BLOCKS, world_size)
            signals = [handle.get_signal_pad(other, shape, torch.int32) for other in range(world_size)]
        except BaseException:
            _unregister_process_group(self._name)
            raise
        self._buffers = {dtype: buffer.view(dtype) for dtype in _TYPES}
        self._owners: list[Any] = [group, handle]
        others = [other for other in range(world_size) if other != rank]
        # Rank r sets element (block, r) of another rank's signals to 1, and the other rank sets it to 0 after its wait.
        self._awaited = [signals[rank][:, other] for other in others]
        self._untaken = [signals[other][:, rank] for other in others]
        # A stream of high priority runs while kernels that wait block other streams.
        self._stream = torch.cuda.Stream(device, priority=-1)
        # CUDA loads a kernel at its first launch, which may wait for running kernels. So `fill_` is launched once now.
        torch.zeros(shape, dtype=torch.int32, device=device)[:, 0].fill_(1)
        self._thread = threading.Thread(target=self._watch, name="small-sums-watch", daemon=True)
        self._thread.start()

    @staticmethod
    def can_sum(tensor: Tensor) -> bool:
        """Return whether the kernel can sum a contiguous tensor. The answer depends only on dtype and size, so it is
        the same on all ranks."""
        return tensor.dtype in _TYPES and 0 < tensor.nbytes < MAX_BYTES and tensor.nbytes % _LOAD_BYTES == 0

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place, on the current stream."""
        part = self._buffers[tensor.dtype][: tensor.numel()]
        part.copy_(tensor)
        offset = tensor.storage_offset() * tensor.element_size()
        is_aligned = offset % _LOAD_BYTES == 0 and tensor.data_ptr() % _LOAD_BYTES == 0
        total = tensor if is_aligned else torch.empty_like(tensor)
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._name, total)
        if not is_aligned:
            tensor.copy_(total)

    def limit(self, seconds: float) -> None:
        """From now on, let kernels wait at most `seconds` for other ranks."""
        self._deadline = time.monotonic() + seconds

    def difference(self, communicator: Communicator) -> str:
        """Compare test sums with the sums of `communicator`; describe a difference, or return "".

        The tensors have the smallest and the largest size of each dtype. Their numbers are small integers, whose sums
        are exact in any order. All ranks must call this method together; it waits for the device.
        """
        pairs = []
        for dtype in _TYPES:
            for size in (_LOAD_BYTES, MAX_BYTES - _LOAD_BYTES):
                index = torch.arange(size // dtype.itemsize, device=self._device)
                own = ((index * (self._rank + 1) + self._rank) % 5).to(dtype)
                pairs.append((own, communicator.sum(own.clone())))
        self.limit(TRIAL_SECONDS)
        for own, _ in pairs:
            self.sum(own)
        are_equal = [torch.equal(own, total) for own, total in pairs]  # `torch.equal` waits for the device
        with self._lock:
            self._deadline = math.inf
            if self._has_released:
                return f"a sum did not end within {TRIAL_SECONDS:g} s"
        return "" if all(are_equal) else "a sum differs from NCCL's"

    def close(self) -> None:
        """Wait for the device, and free the memory. CUDA graphs that contain sums must be destroyed before."""
        with contextlib.suppress(RuntimeError):  # a request has reported the device error
            torch.cuda.synchronize(self._device)
        self._closed.set()
        self._thread.join()
        for owners in (self._buffers, self._awaited, self._untaken, self._owners):
            owners.clear()
        _unregister_process_group(self._name)

    def _watch(self) -> None:
        with torch.cuda.device(self._device), contextlib.suppress(RuntimeError):  # requests report device errors
            while not self._closed.wait(_RELEASE_SECONDS if self._has_released else _LOOK_SECONDS):
                with self._lock:
                    self._has_released |= self._is_aborted() or time.monotonic() >= self._deadline
                if self._has_released:
                    self._release()

    def _release(self) -> None:
        """Write the signals that waiting kernels read, so that the kernels end (see torch's `wait_signal`)."""
        with torch.cuda.stream(self._stream):
            for signals in self._untaken:
                signals.fill_(0)
            for signals in self._awaited:
                signals.fill_(1)
        self._stream.synchronize()


def proven_small_sums(
    communicator: Communicator, store: dist.Store, device: torch.device, is_aborted: Callable[[], bool], may_try: bool
) -> SmallSums | None:
    """Create small sums, and compare their results with those of `communicator`. Return None if the comparison or a
    check before it fails; then `communicator` sums all tensors.

    All ranks must call this function together, and all ranks get the same decision, unless the group was aborted
    meanwhile. After a trial, rank 0 logs one line.

    Args:
        may_try: False if an earlier trial failed. If this is False on any rank, there is no trial.
    """
    rank, world_size = communicator.rank, communicator.world_size
    agree = partial(agreed, communicator, device)
    places = communicator.all_gather(torch.tensor([device.index if may_try else -1], device=device)).tolist()
    if min(places) < 0:
        return None
    created: list[SmallSums] = []

    def make() -> None:
        created.append(SmallSums(rank, world_size, store, device, is_aborted))

    reason = "the group was aborted"
    try:
        refused = agree(lambda: _obstacle(device, places)) or agree(make)
        reason = refused or agree(lambda: created[0].difference(communicator))
    finally:
        if created and reason:
            created[0].close()
    if rank == 0:
        done = f"stay with NCCL: {reason}" if reason else "read the memory of the other devices"
        log.info("sums of less than %d KiB %s", MAX_BYTES // 1024, done)
    return None if reason else created[0]


def _obstacle(device: torch.device, places: list[int]) -> str:
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1 forbids copies between devices"
    if torch.version.hip is not None:
        return "the devices are not of NVIDIA"
    folder = next((os.environ[name] for name in _SOCKET_FOLDERS if name in os.environ), "/tmp")
    if len(os.fsencode(f"{folder}/symm_mem-{os.getpid()}")) > _MAX_PATH_BYTES:
        return "the path of the folder for temporary files is too long for a socket"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"{device} has compute capability {'.'.join(map(str, capability))}, and 8.0 is the least"
    for place in places:
        if place != device.index and not torch.cuda.can_device_access_peer(device, place):
            return f"{device} cannot read the memory of cuda:{place}"
    return ""
