"""Opens checkpoint files and maps their tensors into memory: safetensors files, and `.bin` files through torch.

Each process opens and maps a file by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import pickle
import socket
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import constants, hf_hub_download
from transformers.modeling_utils import str_to_torch_dtype

from parallelformers_ng.checkpoint.mapping import Mapping, libc, map_file
from parallelformers_ng.checkpoint.nodes import Leaf
from parallelformers_ng.errors import CheckpointError
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_DTYPES = {**str_to_torch_dtype, "C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu}
DTYPE_NAMES = dict(zip(_DTYPES.values(), _DTYPES, strict=True))

_END_BYTES = 1 << 16
_OF_ONE_PROCESS = ("_close", "_mapping", "_state")  # not pickled, because only one process can use them
# Exceptions that safetensors, torch and huggingface_hub raise for damaged files and failed downloads.
_READING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError,
    safetensors.SafetensorError,
)  # fmt: skip


@contextlib.contextmanager
def reading_errors(text: str) -> Iterator[None]:
    """Turn errors of reading or downloading into `CheckpointError`, whose message begins with `text`."""
    try:
        yield
    except _READING_ERRORS as error:
        raise_if_of_handler(error)
        raise CheckpointError(f"{text}: {error}") from error


class CheckpointFile:
    """A checkpoint file that stays open in the process that opened it first.

    Workers on the same host open the file through the first process (`/proc/PID/fd`), also after a restart of the
    workers. So workers read the same file, even if a save has put a new file of the same name into the directory.
    Workers on other hosts open the file by its path, or in the hub's cache, if its size and a checksum are equal.

    Attributes:
        entries: name of each stored tensor → its shape and data type.
    """

    entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
    metadata: dict[str, str] = {}

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        try:
            self._look = _look(self.path)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise_if_of_handler(error)
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, descriptor)
        self._descriptor_path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._identity = _identity(self._descriptor_path)
        self._seen_from = mounts()
        cache = os.path.abspath(constants.HF_HUB_CACHE)
        self._in_cache = os.path.relpath(self.path, cache) if self.path.startswith(cache + os.sep) else None

    def tensor(self, key: str) -> torch.Tensor:
        """Return a stored tensor, on CPU: a view of the mapped file if possible, else a copy.

        The first call in a process opens the file.
        """
        raise NotImplementedError

    def maps(self, key: str) -> bool:
        """Return whether `tensor(key)` is sure to return a view of the mapped file, not a copy."""
        return False

    def release(self, key: str) -> None:
        """Unmap the pages of a tensor, so that they no longer count as memory of this process.

        The pages stay in the page cache. Values that were written to a view of the tensor are lost. Only a
        `SafetensorsFile` unmaps pages.
        """

    def name_to_open(self) -> str:
        """Return a path at which this process can open the file that the first process has open. On another host, a
        missing file is downloaded from the hub."""
        if self._seen_from != mounts():
            return self._name_elsewhere()
        for name in (self._descriptor_path, self.path):  # try both: a container may forbid access to /proc/PID/fd
            if os.access(name, os.R_OK) and _identity(name) == self._identity:
                return name
        raise CheckpointError(f"{self.path} has changed since the model was loaded from it; load the model again")

    def _name_elsewhere(self) -> str:
        name = self.path
        if not os.access(name, os.R_OK) and self._in_cache is not None:
            # A path in the hub's cache has the form models--org--name/snapshots/commit/file.
            repository, _, commit, file = self._in_cache.split(os.sep, 3)
            here = f"in the hub's cache on host {socket.gethostname()}"
            with reading_errors(f"{self._in_cache} is not {here} and cannot be downloaded"):
                name = hf_hub_download(repository.removeprefix("models--").replace("--", "/"), file, revision=commit)
        if os.access(name, os.R_OK) and _look(name) == self._look:
            return name
        raise CheckpointError(
            f"host {socket.gethostname()} has no file {self.path}, or a different file of that name; pass a path that"
            " all hosts can read, or the name of a model on the hub"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _OF_ONE_PROCESS}


class SafetensorsFile(CheckpointFile):
    """A safetensors file (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header, tensors.

    Attributes:
        header_checksum: CRC-32 of the 8 bytes of header length and of the header.
    """

    _mapping: Mapping | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with reading_errors(f"{self.path} is damaged, incomplete, or has an unknown data type"):
            # Opening the file with safetensors checks that sizes, offsets and the length of the file agree.
            with safetensors.safe_open(self.path, framework="pt"):
                pass
            with open(self.path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = int.from_bytes(start, "little")
                text = file.read(length)
            self.header_checksum = zlib.crc32(start + text)
            header: dict[str, Any] = json.loads(text)
            self.metadata = header.pop("__metadata__", {})
            self.entries = {key: (tuple(entry["shape"]), _DTYPES[entry["dtype"]]) for key, entry in header.items()}
            self._offsets = {key: entry["data_offsets"][0] + 8 + length for key, entry in header.items()}

    def tensor(self, key: str) -> torch.Tensor:
        (shape, dtype), offset = self.entries[key], self._offsets[key]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._mapping is None:
            with open(self.name_to_open(), "rb") as file:
                self._mapping = map_file(file.fileno())
        if offset % dtype.itemsize:
            data = bytearray(memoryview(self._mapping)[offset : offset + count * dtype.itemsize])
            return torch.frombuffer(data, dtype=dtype).view(shape)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset).view(shape)

    def maps(self, key: str) -> bool:
        (shape, dtype), offset = self.entries[key], self._offsets[key]
        return math.prod(shape) > 0 and offset % dtype.itemsize == 0

    def release(self, key: str) -> None:
        (shape, dtype), offset = self.entries[key], self._offsets[key]
        first = offset - offset % mmap.PAGESIZE
        if self._mapping is not None and (length := offset + math.prod(shape) * dtype.itemsize - first):
            libc().madvise(ctypes.addressof(self._mapping) + first, length, mmap.MADV_DONTNEED)


class PickleFile(CheckpointFile):
    """A `.bin` file, read by `torch.load(weights_only=True)`, which executes no code from the file.

    Objects in the file that are not tensors are left out.
    """

    _state: dict[str, torch.Tensor] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        tensors = {key: tensor for key, tensor in self._load().items() if isinstance(tensor, torch.Tensor)}
        for key, tensor in tensors.items():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise CheckpointError(
                    f"{self.path} has {key} as a {type(tensor).__name__}, and only plain tensors can be read from a"
                    " .bin file; save the model as safetensors"
                )
        self.entries = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}

    def tensor(self, key: str) -> torch.Tensor:
        if self._state is None:
            self._state = self._load()
        return self._state[key].detach()

    def _load(self) -> dict[str, torch.Tensor]:
        name = self.name_to_open()
        with reading_errors(f"{self.path} is damaged or contains more than weights"):
            state = torch.load(name, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(name))
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.path} contains a {type(state).__name__}, not a dictionary of weights")
        return state


@dataclass(eq=False)
class FileLeaf(Leaf):
    file: CheckpointFile = field(repr=False)
    key: str

    def tensor(self) -> torch.Tensor:
        return self.file.tensor(self.key)

    def release(self) -> None:
        self.file.release(self.key)


def open_file(path: str | os.PathLike[str]) -> CheckpointFile:
    return SafetensorsFile(path) if os.fspath(path).endswith(".safetensors") else PickleFile(path)


def mounts() -> tuple[str, str]:
    """Return (boot id, mount namespace). Processes with equal results see the same files under the same paths."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/mnt")


def _look(path: str) -> tuple[int, int]:
    """Return the size of a file, and a checksum of its first and last 64 KiB, to compare files on different hosts.

    These parts suffice: a safetensors file begins with its header, and a `.bin` file ends with CRCs of its tensors.
    """
    with open(path, "rb") as file:
        start = file.read(_END_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        return size, zlib.crc32(file.read(), zlib.crc32(start))


def _identity(path: str) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
