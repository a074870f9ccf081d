"""Finds a checkpoint and its files, in a directory or in the hub's cache, as `from_pretrained` does. Each of its
arguments acts or is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from parallelformers_ng.checkpoint.files import CheckpointFile, open_file
from parallelformers_ng.errors import CheckpointError, ParallelError, did_you_mean
from parallelformers_ng.options import WorkerOptions

_CANDIDATES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_OF_THE_MODEL = ("attn_implementation", "experts_implementation", "key_mapping", "ignore_mismatched_sizes")
_ARGUMENTS = (
    "num_gpus", "fp16", "weights", "model_class", "dtype", "custom_policies", "adapters", "workers", "decode", "seed",
    "prove", "verbose", "progress", "quantize",
)  # fmt: skip
"""Those of `parallelize`."""
_CUT_HERE = "the model is cut here, over num_gpus ranks"
_INSTEAD = {
    "device_map": _CUT_HERE,
    "tp_plan": f"{_CUT_HERE}, by policies (custom_policies=)",
    "tp_size": "num_gpus says over how many ranks the model is cut",
    "max_memory": _CUT_HERE,
    "torch_dtype": "pass dtype=",
    "config": "pass the attributes that differ, num_labels=3, or a model on meta with weights=",
    "state_dict": "pass a model with its weights loaded",
    "quantization_config": "pass quantize='int8', 'int4' or 'fp8', or the path of a checkpoint that is quantized",
    "load_in_8bit": "pass quantize='int8'",
    "load_in_4bit": "pass quantize='int4'",
    "output_loading_info": "missing and unexpected keys are reported in the log",
    "low_cpu_mem_usage": "no process ever holds more than its part",
    "load_options": "pass them as arguments: attn_implementation='eager'",
    # what parallelize took before, and Parallelformers does
    "group": "pass workers=group",
    "compile": "pass decode='compile' or decode=CompileConfig(…)",
    "cuda_graphs": "pass decode='cuda_graphs'",
    "master_addr": "the ranks meet over files of this machine; no address is needed",
    "master_port": "the ranks meet over files of this machine; no port is needed",
    "init_method": "the workers are always processes of their own, started afresh",
    "daemon": "the workers end with this process in any case",
}


@dataclass(frozen=True)
class Location:
    """Location of a checkpoint: the arguments of the same names of `from_pretrained`.

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
        """Return the folder of the files of a local checkpoint."""
        return Path(self.path) / self.subfolder

    def __str__(self) -> str:
        return os.path.join(self.path, self.subfolder) if self.subfolder else self.path


_WHERE = tuple(each.name for each in dataclasses.fields(Location) if each.name != "path")
_FOR_LOADING = (*_WHERE, *_OF_THE_MODEL, "trust_remote_code")


@dataclass
class Source:
    """A checkpoint of which nothing but the configuration has been read.

    Attributes:
        location: location of the checkpoint.
        config: its configuration, with the attributes that were passed; None if the model brings its own.
        trust_remote_code: allow code that comes with it to run here.
        options: further arguments of `from_pretrained`.
        model_class: the class to load; None is the one that the configuration names.
    """

    location: Location
    config: PreTrainedConfig | None = None
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    model_class: type[PreTrainedModel] | None = None


def base_of_adapter(path: str | os.PathLike[str]) -> str | None:
    """Return the path of the model that the adapter in a directory was made for; None if the directory has none."""
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text())["base_model_name_or_path"] if file.is_file() else None


def refuse_options(options: Mapping[str, Any], why: str) -> None:
    """Raise ParallelError for arguments of `from_pretrained` if nothing is loaded with them, and unknown ones."""
    for name in options:
        _refuse_by_name(name)
        if name in _FOR_LOADING:
            raise ParallelError(f"{name}={options[name]!r} is for loading, and {why}")
        hint = did_you_mean(name, _ARGUMENTS) or f"; it takes {', '.join(_ARGUMENTS)}"
        raise ParallelError(f"parallelize has no argument {name!r}{hint}")


def read_source(
    path: str,
    arguments: Mapping[str, Any],
    model_class: type[PreTrainedModel] | None = None,
    of_its_own: bool = True,
) -> Source:
    """Check arguments of `from_pretrained`, and read the configuration.

    Args:
        path: a directory or a model id of the hub.
        arguments: name → value. What is an attribute of the configuration overrides it.
        model_class: same as in `Source`.
        of_its_own: False if a model on `meta` has the configuration; then only where the files are can be said.

    Raises:
        ParallelError: an argument that is unknown, or refused here.
        CheckpointError: there is no such directory, or its configuration is missing or damaged.
    """
    for name in arguments:
        _refuse_by_name(name)
    location = Location(path, **{name: arguments[name] for name in _WHERE if name in arguments})
    rest = {name: value for name, value in arguments.items() if name not in _WHERE}
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not location.directory.is_dir():  # which must not end as a question to the hub
        raise CheckpointError(f"{location} is no directory")
    if not of_its_own:
        refuse_options(rest, "the model is built already")
        return Source(location)
    trusted = rest.pop("trust_remote_code", False)
    options = {name: rest.pop(name) for name in _OF_THE_MODEL if name in rest}
    try:
        config, unknown = AutoConfig.from_pretrained(
            path, trust_remote_code=trusted, return_unused_kwargs=True, **location.download, **rest
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{location.directory / 'config.json'} cannot be read: {error}") from error
    for name in unknown:
        known = (*_ARGUMENTS, *_FOR_LOADING, *config.to_dict(), "num_labels")
        raise ParallelError(
            f"{name!r} is neither an argument of parallelize or from_pretrained nor an attribute of"
            f" {type(config).__name__}{did_you_mean(name, known)}"
        )
    return Source(location, config, trusted, options, model_class)


def _refuse_by_name(name: str) -> None:
    if name in WorkerOptions.__dataclass_fields__:
        raise ParallelError(f"parallelize takes no {name}: pass workers={{{name!r}: …}}")
    if name in _INSTEAD:
        raise ParallelError(f"parallelize takes no {name}: {_INSTEAD[name]}")


def read_generation_config(location: Location) -> GenerationConfig:
    """Return the generation configuration as `from_pretrained` does: its own file, or else settings of older
    configurations."""
    try:
        return GenerationConfig.from_pretrained(location.path, **location.download)
    except OSError:
        return GenerationConfig.from_pretrained(
            location.path, config_file_name="config.json", _from_model_config=True, **location.download
        )


def stored_quantization(location: Location) -> dict[str, Any] | None:
    """Return the quantization configuration beside the weights; None if there is none."""
    try:
        said, _ = PreTrainedConfig.get_config_dict(location.path, **location.download)
    except OSError:  # weights alone
        return None
    return said.get("quantization_config")


def open_weights(location: Location) -> list[CheckpointFile]:
    """Return the files that hold the weights, every one that an index names; nothing but headers is read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    names = [_variant(name, location.variant) for name in _CANDIDATES]
    file = next((path for name in names if (path := _cached(location, name)) is not None), None)
    if file is None:
        raise CheckpointError(f"{location} holds none of {', '.join(names)}; one of them has the weights")
    if not file.endswith(".json"):
        return [open_file(file)]
    try:
        index = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{file} is damaged: it has no weight_map from names to files")
    if any(os.path.basename(name) != name for name in weight_map.values()):
        raise CheckpointError(f"{file} is damaged: it names a file outside its directory")
    try:
        paths, _ = get_checkpoint_shard_files(location.path, file, **location.download)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"a file that {file} names is missing: {error}") from error
    files = {os.path.basename(path): open_file(path) for path in paths}
    for key, name in weight_map.items():
        if key not in files[name].entries:
            raise CheckpointError(f"{file} says that {name} holds {key}, and it does not: one of them is damaged")
    return list(files.values())


def _variant(name: str, variant: str | None) -> str:
    """`model.safetensors` → `model.fp16.safetensors`, as the hub names them."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{variant}.{ending}" if variant else name


def _cached(location: Location, name: str) -> str | None:
    """Return the path of a file, fetched if need be; None if there is no file of that name."""
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
