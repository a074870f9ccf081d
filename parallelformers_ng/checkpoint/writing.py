"""Writes tensors to safetensors files one at a time, and replaces directories in one step."""

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
from typing import Any

import numpy as np
import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory

from parallelformers_ng.checkpoint.files import DTYPE_NAMES
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.errors import CheckpointError
from parallelformers_ng.sharding.tensor_plan import bytes_of

Entry = tuple[tuple[int, ...], torch.dtype]  # (shape, data type)

_BLOCK = 1 << 20  # `checksum` adds up blocks of this size, in bytes, and computes the CRC of the sums
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class WrittenFile:
    """A safetensors file that was written.

    Attributes:
        header: CRC-32 of the 8 bytes of header length and of the header.
    """

    name: str
    size: int
    header: int
    checksums: dict[str, int]


def split_into_files(tensors: dict[str, Any], stem: str, limit: int, size: Callable[[Any], int]) -> StateDictSplit:
    """Divide tensors among files of at most `limit` bytes, which are named `stem`, or `stem-00001-of-00002`, ….

    Args:
        size: function that returns the bytes of a tensor.
    """
    pattern = f"{stem}{{suffix}}.safetensors"
    return split_state_dict_into_shards_factory(
        tensors, get_storage_size=size, filename_pattern=pattern, max_shard_size=limit
    )


def write_safetensors(
    path: Path, entries: Mapping[str, Entry], tensor: Callable[[str], torch.Tensor], progress: Progress | None = None
) -> WrittenFile:
    """Write a safetensors file, with one tensor in memory at a time, and flush the file to the disk.

    Tensors with larger elements are written first; tensors with equal element sizes keep their order in `entries`. The
    format is that of https://huggingface.co/docs/safetensors.
    """
    order = sorted(entries, key=lambda name: -entries[name][1].itemsize)  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype = entries[name]
        start, end = end, end + bytes_of(*entries[name])
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # the tensors must start at a multiple of 64 bytes
    head = len(text).to_bytes(8, "little") + text
    checksums = {}
    with open(path, "wb") as file:
        file.write(head)
        for name in order:
            value = tensor(name).detach().to("cpu", entries[name][1])
            assert value.nbytes == bytes_of(*entries[name]), f"{name} has a different size than its entry"
            checksums[name] = checksum(value)
            file.write(bytes_of_tensor(value))
            if progress is not None:
                progress(value.nbytes)
            del value
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(head) + end, zlib.crc32(head), checksums)


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a CPU tensor that detects flipped bits, lost pages and swapped blocks.

    The bytes of each whole block of 1 MiB are added up as 64-bit integers. The checksum is the CRC-32 of these sums and
    of the rest. So it is about as fast as reading the memory, but does not detect deliberate changes.
    """
    data = bytes_of_tensor(tensor)
    blocks = len(data) // _BLOCK
    words = data[: blocks * _BLOCK].view("<u8").reshape(blocks, _BLOCK // 8)
    sums = words.sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[blocks * _BLOCK :].tobytes(), zlib.crc32(sums.tobytes()))


@contextlib.contextmanager
def replaced_directory(target: Path, ours: Callable[[Path], set[str] | None]) -> Iterator[Path]:
    """Yield a new directory for the block to write to. If the block raises no error, it replaces `target` atomically.

    After an interruption, `target` is either the complete old directory or the complete new directory. Only on a file
    system without `renameat2(RENAME_EXCHANGE)`, the replacement takes three steps.

    Args:
        ours: function that returns the names of files in the old directory that need not be kept; None if the directory
            is not a sharded directory, which is an error. All other files are copied to the new directory.
    """
    target = target.absolute()
    replaceable = ours(target) if target.is_dir() else None
    if replaceable is None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no sharded checkpoint; choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            for kept in target.iterdir():
                if kept.name not in (replaceable or ()) and not (partial / kept.name).exists():
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
    """Swap two directories atomically by `renameat2(RENAME_EXCHANGE)`; in three steps if that is not supported."""
    rename = ctypes.CDLL(None, use_errno=True).renameat2
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(second))
    aside = first.with_suffix(".old")  # temporary name for a swap in three steps
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_of_tensor(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a CPU tensor as a uint8 array with one dimension, without a copy if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
