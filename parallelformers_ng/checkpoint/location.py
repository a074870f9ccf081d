"""Where a checkpoint's files are: in a directory, or in the cache of the hub, as `from_pretrained` finds them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from parallelformers_ng.checkpoint.files import CheckpointFile, open_file
from parallelformers_ng.errors import CheckpointError

_CANDIDATES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is; the arguments of the same names of `from_pretrained`.

    Attributes:
        path: a directory or a model id of the hub.
        variant: "fp16" for `model.fp16.safetensors`.
    """

    path: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | None = None
    local_files_only: bool = False
    subfolder: str = ""
    variant: str | None = None

    @property
    def download(self) -> dict[str, Any]:
        """Arguments for the functions that fetch or find a file."""
        options = dataclasses.asdict(self)
        del options["path"], options["variant"]
        return {**options, "revision": self.revision or "main"}

    @property
    def directory(self) -> Path:
        """Where its files lie, where it is a local one."""
        return Path(self.path) / self.subfolder

    def __str__(self) -> str:
        return os.path.join(self.path, self.subfolder) if self.subfolder else self.path


def check_directory(location: Location) -> None:
    """A path that is meant to be local must not end as a question to the hub.

    Raises:
        CheckpointError: it is meant to be local, and is no directory.
    """
    looks_local = location.path.startswith((".", "/", "~")) or location.path.count("/") > 1
    if looks_local and not location.directory.is_dir():
        raise CheckpointError(f"{location} is no directory")


def read_config(
    location: Location, trust_remote_code: bool, attributes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The model's configuration, with some attributes changed; and those of them that it does not have.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return AutoConfig.from_pretrained(
            location.path,
            trust_remote_code=trust_remote_code,
            return_unused_kwargs=True,
            **location.download,
            **attributes,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{location.directory / 'config.json'} cannot be read: {error}") from error


def read_generation_config(location: Location) -> GenerationConfig:
    """As `from_pretrained` finds it: its own file, else what older configurations hold."""
    try:
        return GenerationConfig.from_pretrained(location.path, **location.download)
    except OSError:
        return GenerationConfig.from_pretrained(
            location.path, config_file_name="config.json", _from_model_config=True, **location.download
        )


def open_weights(location: Location) -> list[CheckpointFile]:
    """The files that hold the weights, every one that an index names; nothing but headers is read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    names = [_variant(name, location.variant) for name in _CANDIDATES]
    found = next((path for name in names if (path := _cached(location, name)) is not None), None)
    if found is None:
        raise CheckpointError(f"{location} holds none of {', '.join(names)}; one of them has the weights")
    if not found.endswith(".json"):
        return [open_file(found)]
    index = _read_json(found)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{found} is damaged: it has no weight_map from names to files")
    if any(os.path.basename(name) != name for name in weight_map.values()):
        raise CheckpointError(f"{found} is damaged: it names a file outside its directory")
    try:
        paths, _ = get_checkpoint_shard_files(location.path, found, **location.download)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"a file that {found} names is missing: {error}") from error
    files = {os.path.basename(path): open_file(path) for path in paths}
    for key, name in weight_map.items():
        if key not in files[name].entries():
            raise CheckpointError(f"{found} says that {name} holds {key}, and it does not: one of them is damaged")
    return list(files.values())


def _variant(name: str, variant: str | None) -> str:
    """`model.safetensors` → `model.fp16.safetensors`, as the hub names them."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{variant}.{ending}" if variant else name


def _cached(location: Location, name: str) -> str | None:
    """Where a file is, fetched if need be; None where there is none of that name."""
    try:
        return cached_file(
            location.path,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            **location.download,
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} of {location} cannot be fetched: {error}") from error


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
