"""Writing tensors to files one at a time, and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from parallelformers_ng.checkpoint.files import DTYPE_NAMES
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.errors import CheckpointError, ParallelError
from parallelformers_ng.sharding.tensor_plan import bytes_of

Entry = tuple[tuple[int, ...], torch.dtype]
"""Shape and data type of a tensor."""

_BLOCK = 1 << 20  # bytes that one word of a checksum stands for
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written.

    Attributes:
        name: its name in the directory.
        size: bytes.
        header: CRC-32 of the length and the header.
        checksums: for each tensor in it, `checksum` of its bytes.
    """

    name: str
    size: int
    header: int
    checksums: dict[str, int]


def write_safetensors(
    path: Path, entries: Mapping[str, Entry], tensor: Callable[[str], torch.Tensor], progress: Progress | None = None
) -> WrittenFile:
    """Write a safetensors file with one tensor at a time in memory.

    Args:
        entries: future content, in the order of writing among equal sizes of element.
        tensor: gives each in turn.

    Raises:
        OSError: the disk is full, or the place cannot be written to.
    """
    order = sorted(entries, key=lambda name: -entries[name][1].itemsize)  # so that every tensor is aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype = entries[name]
        start, end = end, end + bytes_of(*entries[name])
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # the tensors start on a multiple of 64 bytes
    head = len(text).to_bytes(8, "little") + text
    checksums = {}
    with open(path, "wb") as file:
        file.write(head)
        for name in order:
            value = tensor(name).detach().to("cpu", entries[name][1])
            assert value.nbytes == bytes_of(*entries[name]), f"{name} is not of the shape that was announced"
            checksums[name] = checksum(value)
            file.write(_bytes_of(value))
            if progress is not None:
                progress(value.nbytes)
            del value
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(head) + end, zlib.crc32(head), checksums)


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 over the 64-bit sums of a tensor's blocks of 1 MiB: it notices flipped bits, lost pages and blocks that
    changed places at the speed of memory. It is no defence against forgery."""
    data = _bytes_of(tensor)
    blocks = len(data) // _BLOCK
    words = data[: blocks * _BLOCK].view("<u8").reshape(blocks, _BLOCK // 8)
    sums = words.sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[blocks * _BLOCK :].tobytes(), zlib.crc32(sums.tobytes()))


def parse_size(
    size: int | str, argument: str = "max_shard_size", refusal: type[ParallelError] = CheckpointError
) -> int:
    """`"5GB"` → 5 000 000 000; `"1GiB"` counts in powers of 1024.

    Args:
        argument: the caller's name for it, for the error.
        refusal: class of the error for a bad size.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    text = str(size).strip().upper()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    with contextlib.suppress(ValueError):  # told below, with everything else that is no size
        if unit and (count := float(text.removesuffix(unit))) > 0:
            return int(count * _UNITS[unit])
    raise refusal(f"{argument} is {size!r}; it takes bytes, or a text like '5GB' or '500MB'")


@contextlib.contextmanager
def replaced_directory(target: Path, ours: Callable[[Path], set[str] | None]) -> Iterator[Path]:
    """A new directory to write to, which takes the place of `target` in one step when the block ends well.

    Whatever interrupts it, `target` is then the old one or the new one, whole.

    Args:
        ours: the files in an existing `target` that are ours to replace; None if it is none of our directories.
            Other files in it are kept.

    Raises:
        CheckpointError: `target` exists and is something else.
    """
    target = target.absolute()
    replaceable: set[str] = set()
    if target.exists():
        known = ours(target) if target.is_dir() else None
        if known is None and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{target} exists and is no sharded checkpoint; choose another directory")
        replaceable = known or set()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            for kept in target.iterdir():
                if kept.name not in replaceable and not (partial / kept.name).exists():
                    copy = shutil.copytree if kept.is_dir() else shutil.copy2
                    copy(kept, partial / kept.name)
        _sync(partial)
        if target.exists():
            _exchange(partial, target)
        else:
            partial.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(first: Path, second: Path) -> None:
    """Swap two directories in one step: renameat2(2) with RENAME_EXCHANGE."""
    rename = ctypes.CDLL(None, use_errno=True).renameat2
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(second))
    aside = first.with_suffix(".old")  # a file system that cannot swap: two steps
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
