"""Writes and reads sharded directories: checkpoints in which each rank has its own files with its shards.

config.json  generation_config.json
rank-00000-of-00002.safetensors  …            shards of a rank, in files of at most `max_shard_size`
shared.safetensors  …                         replicated tensors, stored once
parallelformers_ng.index.json                 file and ranges of every shard, and checksums of all shards and headers
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from parallelformers_ng.checkpoint.encoded import Decoded
from parallelformers_ng.checkpoint.files import FileLeaf, SafetensorsFile
from parallelformers_ng.checkpoint.nodes import Node, ShardedNode
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.writing import WrittenFile, checksum, split_into_files, write_safetensors
from parallelformers_ng.errors import CheckpointError
from parallelformers_ng.sharding.encoding import SCALE, Encoding
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import Shard, TensorPlan

INDEX_NAME = "parallelformers_ng.index.json"
_VERSION = 2  # version of the index; an index of version 1 lists no quantized tensors
_OWN_FILE = re.compile(r"(rank-\d{5}-of-\d{5}|shared)(-\d{5}(-of-\d{5})?)?\.safetensors")

Part = Callable[[TensorPlan], torch.Tensor]  # returns one rank's shard of the tensor


def write_rank(
    directory: Path, plan: ShardPlan, names: Iterable[str], rank: int, limit: int, part: Part, progress: Progress
) -> list[WrittenFile]:
    """Write the files of one rank; rank 0 also writes the files with the replicated tensors.

    Tensors whose shard on the rank is all zeros are left out.

    Args:
        limit: largest number of tensor bytes in a file; a larger tensor gets its own file.
    """
    written = []
    for file, file_tensors in _files_of(plan, names, rank, limit).items():
        tensors = {name: plan.tensors[name] for name in file_tensors}
        entries = {name: (tensor.shards[rank].shape(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        written.append(write_safetensors(directory / file, entries, lambda name: part(plan.tensors[name]), progress))
    return written


def saved_names(model: PreTrainedModel, plan: ShardPlan) -> list[str]:
    """Return the storage names of the parameters and persistent buffers; a quantized parameter has two names."""
    names = [name for name in torch.nn.Module.state_dict(model) if name in plan.tensors]
    return list(dict.fromkeys(part.storage for name in names for part in plan.parts(name)))


def write_index(
    directory: Path, model: PreTrainedModel, plan: ShardPlan, names: Iterable[str], ranks: Iterable[list[WrittenFile]]
) -> None:
    """Write the configuration files, and then the index; `ranks` has the result of `write_rank` for each rank."""
    write_configs(model, directory)
    by_rank = [{name: file for file in files for name in file.checksums} for files in ranks]
    stored = plan.as_stored
    aliases = stored.aliases()
    tensors: dict[str, Any] = {}
    for name in names:
        tensor = stored.tensors[name]
        parts = {}
        for rank, shard in enumerate(tensor.shards[:1] if tensor.is_replicated else tensor.shards):
            if file := by_rank[rank].get(name):
                parts[str(rank)] = {"file": file.name, "checksum": file.checksums[name], "ranges": shard.ranges}
        dim = next((shard.dim for shard in tensor.shards if shard.dim is not None), None)
        described = {"shape": tensor.shape, "dtype": str(tensor.dtype), "dim": dim, "parts": parts}
        tensors[name] = {**described, "names": aliases[name]}
    index = {
        "version": _VERSION,
        "model_class": plan.model_class,
        "world_size": plan.world_size,
        "policy": plan.policy,
        "files": {f.name: {"size": f.size, "header": f.header} for files in by_rank for f in files.values()},
        "tensors": tensors,
        "quantized": {
            name: {
                "dtype": str(plan.tensors[name].dtype).removeprefix("torch."),
                "encoding": dataclasses.asdict(encoding),
            }
            for name, encoding in plan.quantized.items()
        },
    }
    text = json.dumps({**index, "checksum": _index_checksum(index)}, indent=1)
    with open(directory / INDEX_NAME, "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def write_configs(model: PreTrainedModel, directory: Path) -> None:
    """Write the configuration, the generation configuration, and the custom modeling code if the model has any.

    The function sets `dtype` and `architectures` in the model's configuration.
    """
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, directory, config=model.config)
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def is_sharded_directory(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / INDEX_NAME).is_file()


def files_of(path: Path) -> set[str] | None:
    """Return the names of the files that belong to a sharded directory; None if `path` is no sharded directory."""
    if not is_sharded_directory(path):
        return None
    config = {"config.json", "generation_config.json", INDEX_NAME}
    return config | {file.name for file in path.iterdir() if _OWN_FILE.fullmatch(file.name)}


def open_sharded(path: str | os.PathLike[str]) -> dict[str, Node]:
    """Return a node for each tensor of a sharded directory, by the tensor's name in the model. No weights are read.

    When a rank later reads its own shard, it reads only its own file, and gets a view of the mapped file. The first
    read of a shard in a process verifies its checksum.
    """
    directory = Path(path)
    index = _read_index(directory / INDEX_NAME)
    files = {}
    for name, described in index["files"].items():
        file = files[name] = SafetensorsFile(directory / name)
        if (file.size, file.header_checksum) != (described["size"], described["header"]):
            raise CheckpointError(f"{file.path} is damaged or was replaced: its size or header differs from the index")
    nodes: dict[str, Node] = {}
    for name, described in index["tensors"].items():
        shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"].removeprefix("torch."))
        parts: dict[int, tuple[Shard, Node]] = {}
        for rank, part in described["parts"].items():
            ranges = tuple((start, stop) for start, stop in part["ranges"])
            shard = Shard(described["dim"], ranges) if described["dim"] is not None else Shard()
            file, entry = files[part["file"]], (shard.shape(shape), dtype)
            if file.entries.get(name) != entry:
                raise CheckpointError(f"{file.path} is damaged: {name} is {file.entries.get(name)} instead of {entry}")
            parts[int(rank)] = shard, CheckedLeaf(*entry, file, name, part["checksum"])
        nodes.update(dict.fromkeys(described["names"], ShardedNode(shape, dtype, parts)))
    for name, described in index.get("quantized", {}).items():
        encoding, dtype = Encoding(**described["encoding"]), getattr(torch, described["dtype"].removeprefix("torch."))
        numbers = nodes[name]
        shape = encoding.shape(numbers.shape)
        nodes[name] = Decoded(shape, dtype, encoding, (numbers, nodes.pop(name + SCALE)))
    return nodes


@dataclass(eq=False)
class CheckedLeaf(FileLeaf):
    """A tensor in a file. The first read in a process raises CheckpointError if its checksum is wrong."""

    checksum: int
    checked: bool = False

    def tensor(self) -> torch.Tensor:
        tensor = super().tensor()
        if not self.checked and checksum(tensor) != self.checksum:
            raise CheckpointError(f"{self.file.path} is damaged: {self.key} has a wrong checksum; save the model again")
        self.checked = True
        return tensor


def _files_of(plan: ShardPlan, names: Iterable[str], rank: int, limit: int) -> dict[str, list[str]]:
    own = {name: plan.tensors[name] for name in names if not plan.tensors[name].shards[rank].zero}
    shared = {name: tensor for name, tensor in own.items() if tensor.is_replicated and rank == 0}
    cut = {name: tensor for name, tensor in own.items() if not tensor.is_replicated}
    files: dict[str, list[str]] = {}
    for stem, tensors in ((f"rank-{rank:05}-of-{plan.world_size:05}", cut), ("shared", shared)):
        files |= split_into_files(tensors, stem, limit, lambda tensor: tensor.bytes_on(rank)).filename_to_tensors
    return files


def _index_checksum(index: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text("utf-8"))
        expected = index.pop("checksum")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if _index_checksum(index) != expected:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
    if not 1 <= index["version"] <= _VERSION:
        raise CheckpointError(f"{path} has version {index['version']}; this library reads up to version {_VERSION}")
    return index
