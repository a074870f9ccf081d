"""Checkpoint files, opened by each process for itself: safetensors mapped privately, `.bin` through torch's mapping."""

from __future__ import annotations

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

from parallelformers_ng.checkpoint.mapping import map_file
from parallelformers_ng.checkpoint.nodes import Leaf
from parallelformers_ng.errors import CheckpointError

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
DTYPE_NAMES = dict(zip(_DTYPES.values(), _DTYPES, strict=True))

_OF_ONE_PROCESS = ("_close", "_mapping", "_start", "_state")
"""Attributes of a file that do not travel."""


class CheckpointFile:
    """One file of a checkpoint, held open by the process that found it.

    The workers open it again through that process (`/proc/PID/fd`), now or after a restart. So they read the same file
    even if another has taken its name: a save over the model's own directory, say. Workers on other hosts open the file
    of that name, or its copy in the hub's cache, if size and beginning match.

    Args:
        path: path of the file.

    Attributes:
        entries: shape and data type of everything stored.
        metadata: further text in the file, name → text.

    Raises:
        CheckpointError: it is not there.
    """

    entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
    metadata: dict[str, str] = {}

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, descriptor)
        self._held = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._identity = _identity(self._held)
        self._seen_from = mounts()
        cache = os.path.abspath(constants.HF_HUB_CACHE)
        self._in_cache = os.path.relpath(self.path, cache) if self.path.startswith(cache + os.sep) else None

    def tensor(self, key: str) -> torch.Tensor:
        """Return one stored tensor, a view of the mapped file."""
        raise NotImplementedError

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is known to lie in the mapped file."""
        return False

    def maps(self, key: str) -> bool:
        """Return whether `tensor` is known to be a view of the mapped file."""
        return False

    def release(self, key: str) -> None:
        """Unmap the pages of one tensor: they stay in the page cache but no longer count as this process's memory."""

    def name_to_open(self) -> str:
        """Return a path at which the file that was found can be opened.

        Raises:
            CheckpointError: it was written to since, or it is gone.
        """
        if self._seen_from != mounts():
            return self._name_elsewhere()
        for name in (self._held, self.path):  # a container may forbid the first
            if os.access(name, os.R_OK) and _identity(name) == self._identity:
                return name
        raise CheckpointError(f"{self.path} has changed since the model was loaded from it; load the model again")

    def is_like(self, name: str) -> bool:
        """Return whether a file of another host may be this one."""
        return os.stat(name).st_size == self._identity[2]

    def _name_elsewhere(self) -> str:
        """Return the name to open on a host that may have other files under the same names; see `name_to_open`."""
        names = [self.path]
        if self._in_cache is not None:
            names.append(os.path.join(constants.HF_HUB_CACHE, self._in_cache))
            if not os.path.exists(names[-1]):
                _fetch(self._in_cache)
        for name in names:
            if os.access(name, os.R_OK) and self.is_like(name):
                return name
        raise CheckpointError(
            f"{self.path} is not on host {socket.gethostname()}, or is another file there; give a path that all hosts"
            " see, or the name of a model on the hub"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _OF_ONE_PROCESS}


class SafetensorsFile(CheckpointFile):
    """A safetensors file (https://huggingface.co/docs/safetensors): 8 bytes of length, a JSON header, the tensors.

    Attributes:
        size: bytes.
        header_checksum: CRC-32 of the length and the header.
    """

    _mapping: mmap.mmap | None = None
    _start = 0

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            # The reference reader checks that sizes, offsets and the length of the file agree.
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
        except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path} is damaged or incomplete: {error}") from error
        except KeyError as error:
            raise CheckpointError(
                f"{self.path} is damaged, or holds a data type this version cannot read: {error}"
            ) from error

    def tensor(self, key: str) -> torch.Tensor:
        (shape, dtype), offset = self.entries[key], self._offsets[key]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        mapping = self._map()
        if offset % dtype.itemsize:
            data = bytearray(mapping[offset : offset + count * dtype.itemsize])
            return torch.frombuffer(data, dtype=dtype).view(shape)
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._mapping is not None and self._start <= tensor.data_ptr() < self._start + len(self._mapping)

    def maps(self, key: str) -> bool:
        (shape, dtype), offset = self.entries[key], self._offsets[key]
        return math.prod(shape) > 0 and offset % dtype.itemsize == 0

    def release(self, key: str) -> None:
        (shape, dtype), offset = self.entries[key], self._offsets[key]
        first = offset - offset % mmap.PAGESIZE
        if self._mapping is not None and (length := offset + math.prod(shape) * dtype.itemsize - first):
            self._mapping.madvise(mmap.MADV_DONTNEED, first, length)

    def is_like(self, name: str) -> bool:
        with open(name, "rb") as file:
            start = file.read(8)
            text = file.read(int.from_bytes(start, "little")) if super().is_like(name) else b""
        return zlib.crc32(start + text) == self.header_checksum

    def _map(self) -> mmap.mmap:
        if self._mapping is None:
            with open(self.name_to_open(), "rb") as file:
                self._mapping = map_file(file.fileno())
            self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        return self._mapping


class PickleFile(CheckpointFile):
    """A `.bin` file, read by torch with `weights_only=True`: nothing in it is executed."""

    _state: dict[str, torch.Tensor] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        tensors = {key: tensor for key, tensor in self._load().items() if isinstance(tensor, torch.Tensor)}
        for key, tensor in tensors.items():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise CheckpointError(
                    f"{self.path} holds {key} as a {type(tensor).__name__}, a tensor of a library's own kind, and plain"
                    " ones can be read; save the model as safetensors"
                )
        self.entries = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}

    def tensor(self, key: str) -> torch.Tensor:
        if self._state is None:
            self._state = self._load()
        return self._state[key].detach()

    def _load(self) -> dict[str, torch.Tensor]:
        name = self.name_to_open()
        try:
            state = torch.load(name, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(name))
        except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path} is damaged or holds more than weights: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.path} holds a {type(state).__name__}, not a dictionary of weights")
        return state


@dataclass(eq=False)
class FileLeaf(Leaf):
    """A tensor in a file.

    Attributes:
        file: the file.
        key: its name there.
    """

    file: CheckpointFile = field(repr=False)
    key: str

    def tensor(self) -> torch.Tensor:
        return self.file.tensor(self.key)

    def release(self) -> None:
        self.file.release(self.key)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.file.holds(tensor)


def open_file(path: str | os.PathLike[str]) -> CheckpointFile:
    """Open a file of either kind by its ending."""
    return SafetensorsFile(path) if os.fspath(path).endswith(".safetensors") else PickleFile(path)


def file_leaves(file: CheckpointFile) -> Iterator[FileLeaf]:
    """Everything in a file."""
    for key, (shape, dtype) in file.entries.items():
        yield FileLeaf(shape, dtype, file, key)


def mounts() -> tuple[str, str]:
    """Return an id of the machine and its mounts: processes with the same id see the same files."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/mnt")


def _fetch(in_cache: str) -> None:
    """Have the hub's cache of this host hold a file, given where: `models--org--name/snapshots/commit/file`."""
    repository, _, commit, name = in_cache.split(os.sep, 3)
    try:
        hf_hub_download(repository.removeprefix("models--").replace("--", "/"), name, revision=commit)
    except (OSError, ValueError) as error:  # of the network, of the hub, offline
        raise CheckpointError(f"{in_cache} is not in the hub's cache of {socket.gethostname()}: {error}") from error


def _identity(path: str) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
