"""Broadcasts one rank's result, tensors in any nested structure, to all ranks; agrees on the outcome of a trial."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import GroupError
from parallelformers_ng.wire.by_value import ReferencePickler, ReferenceUnpickler

T = TypeVar("T")

# The other ranks do not know a result's size, so the first exchange has this size. A decode step's result usually fits.
FIRST_BYTES = 32 * 1024
_WORD, _LINE = 8, 64
_TEXT_BYTES = 256


def share(communicator: Communicator, source: int, compute: Callable[[], T] | None, device: torch.device) -> T:
    """Run `compute` on rank `source`, and return its result on every rank. All ranks must call this function together.

    If `compute` raises an exception, or the result cannot be pickled, this rank raises the exception. The caller must
    then abort the communicator, as for any collective.

    Args:
        compute: function that returns the result. A rank other than `source` passes None; if it passes a function, it
            gets the result of its own function.
    """
    result: Any = None if compute is None else compute()
    if communicator.world_size == 1:
        return result
    data = _packed(result, device) if communicator.rank == source else None
    shared = _broadcast(communicator, source, data, device)
    return _unpacked(shared) if compute is None else result


def agreed(
    communicator: Communicator, device: torch.device, part: Callable[[], str | None], of_first: bool = False
) -> str:
    """Run a check on every rank, and return the same reason on all ranks: that of the first rank whose check failed, or
    "".

    Args:
        part: check that returns the reason for a failure, or None or "". An exception is a failure, too. With several
            ranks, a reason is cut after 256 bytes in UTF-8.
        of_first: whether only the check of rank 0 counts.
    """
    try:
        reason = part() or ""
    except GroupError:
        raise
    except Exception as error:  # any error is a failed check, for example a lack of memory
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if communicator.world_size == 1:
        return reason
    text = reason.encode()[:_TEXT_BYTES]
    slot = torch.tensor([*text, *bytes(_TEXT_BYTES - len(text))], dtype=torch.uint8, device=device)
    rows = communicator.all_gather(slot).view(-1, _TEXT_BYTES).tolist()
    told = rows[:1] if of_first else rows
    return next((bytes(row).rstrip(b"\0").decode(errors="replace") for row in told if row[0]), "")


def _broadcast(communicator: Communicator, source: int, data: Tensor | None, device: torch.device) -> Tensor:
    def exchange(part: Tensor | None, size: int) -> Tensor:
        sizes = [size if rank == source else 0 for rank in range(communicator.world_size)]
        own = torch.empty(0, dtype=torch.uint8, device=device) if part is None else part
        return communicator.all_gather(own, 0, sizes)

    first = exchange(None if data is None else data[:FIRST_BYTES], FIRST_BYTES)
    size = int(first[:_WORD].view(torch.int64))
    if size <= FIRST_BYTES:
        return first
    return torch.cat([first, exchange(None if data is None else data[FIRST_BYTES:], size - FIRST_BYTES)])


def _packed(value: Any, device: torch.device) -> Tensor:
    """Return a value as a uint8 tensor of at least `FIRST_BYTES`.

    The tensor has the total size, the size of the pickle, the pickle, and then each tensor of the value at a multiple
    of 64 bytes.
    """
    tensors: list[tuple[int, Tensor]] = []
    end = 0

    def reference(item: Any) -> tuple[int, tuple[int, ...], torch.dtype] | None:
        nonlocal end
        if not isinstance(item, Tensor):
            return None
        place, end = end, _aligned(end + item.nbytes)
        tensors.append((place, item))
        return place, tuple(item.shape), item.dtype

    buffer = io.BytesIO()
    ReferencePickler(buffer, reference).dump(value)
    begin = _aligned(2 * _WORD + buffer.tell())
    head = struct.pack("=2q", begin + end, buffer.tell()) + buffer.getvalue()
    data = torch.empty(max(begin + end, FIRST_BYTES), dtype=torch.uint8)
    data[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    data = data.to(device)
    for place, tensor in tensors:
        part = data[begin + place : begin + place + tensor.nbytes]
        part.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return data


def _unpacked(data: Tensor) -> Any:
    length = int(data[_WORD : 2 * _WORD].view(torch.int64))
    begin = _aligned(2 * _WORD + length)

    def tensor(reference: Any) -> Tensor:
        place, shape, dtype = reference
        start = begin + place
        return data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return ReferenceUnpickler(data[2 * _WORD : 2 * _WORD + length].cpu().numpy().tobytes(), tensor).load()


def _aligned(place: int) -> int:
    return -(-place // _LINE) * _LINE
