"""Finds the files of a checkpoint in a directory or on the hub, as `from_pretrained` does.

Every argument of `from_pretrained` takes effect or raises an error; no argument is ignored.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import _add_variant
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from parallelformers_ng.checkpoint.files import CheckpointFile, open_file, reading_errors
from parallelformers_ng.errors import CheckpointError, ParallelError, did_you_mean
from parallelformers_ng.options import WorkerOptions
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_CANDIDATES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_NONE_IF_ABSENT = {"_raise_exceptions_for_gated_repo": False, "_raise_exceptions_for_missing_entries": False}
_OF_THE_MODEL = ("attn_implementation", "experts_implementation", "key_mapping", "ignore_mismatched_sizes")
# Names of the arguments of `parallelize`, for error messages about unknown arguments.
_ARGUMENTS = (
    "num_gpus", "fp16", "weights", "model_class", "dtype", "custom_policies", "adapters", "workers", "decode", "seed",
    "prove", "verbose", "progress", "quantize",
)  # fmt: skip
_CUT_HERE = "parallelize divides the model over num_gpus ranks"
_INSTEAD = {
    "device_map": _CUT_HERE,
    "tp_plan": f"{_CUT_HERE}, by policies (custom_policies=)",
    "tp_size": "pass num_gpus=, the number of ranks",
    "max_memory": _CUT_HERE,
    "torch_dtype": "pass dtype=",
    "config": "pass the changed attributes as arguments (num_labels=3), or a model on meta with weights=",
    "state_dict": "pass a model with its weights loaded",
    "quantization_config": "pass quantize='int8', 'int4' or 'fp8', or the path of a quantized checkpoint",
    "load_in_8bit": "pass quantize='int8'",
    "load_in_4bit": "pass quantize='int4'",
    "output_loading_info": "missing and unexpected keys are reported in the log",
    "low_cpu_mem_usage": "a process never loads more than its own part of the model",
    "load_options": "pass them as arguments: attn_implementation='eager'",
    # `parallelize` of older versions, or of Parallelformers, had the arguments below.
    "group": "pass workers=group",
    "compile": "pass decode='compile' or decode=CompileConfig(…)",
    "cuda_graphs": "pass decode='cuda_graphs'",
    "master_addr": "the ranks connect through files of this machine; no address is needed",
    "master_port": "the ranks connect through files of this machine; no port is needed",
    "init_method": "each worker is always a new process",
    "daemon": "the workers always end with this process",
}


@dataclass(frozen=True)
class Location:
    """Location of a checkpoint: the arguments of `from_pretrained` that say where the files are.

    Attributes:
        path: local directory, or model id of the hub.
        variant: part of the file names, for example "fp16" for `model.fp16.safetensors`.
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
        """Keyword arguments for transformers' functions that find or download a file, such as `cached_file`."""
        options = dataclasses.asdict(self)
        del options["path"], options["variant"]
        return {**options, "revision": self.revision or "main"}

    @property
    def directory(self) -> Path:
        """Folder with the files of a local checkpoint; do not use it if `path` is a model id of the hub."""
        return Path(self.path) / self.subfolder

    def __str__(self) -> str:
        return os.path.join(self.path, self.subfolder) if self.subfolder else self.path


_WHERE = tuple(each.name for each in dataclasses.fields(Location) if each.name != "path")
_FOR_LOADING = (*_WHERE, *_OF_THE_MODEL, "trust_remote_code")


@dataclass
class Source:
    """A checkpoint whose configuration has been read, and whose weights have not been read.

    Attributes:
        config: configuration with the caller's changes; None if the weights are for a model that the caller has built.
    """

    location: Location
    config: PreTrainedConfig | None = None
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    model_class: type[PreTrainedModel] | None = None


def base_of_adapter(path: str | os.PathLike[str]) -> str | None:
    """Return the path or hub id of the base model of the peft adapter in a directory; None if there is no adapter."""
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text())["base_model_name_or_path"] if file.is_file() else None


def refuse_options(options: Mapping[str, Any], why: str) -> None:
    """Raise ParallelError if there are options, because no model is loaded that could use them.

    Args:
        why: reason why no model is loaded, to follow "… is for loading, and" in the message.
    """
    for name in options:
        _refuse_by_name(name)
        if name in _FOR_LOADING:
            raise ParallelError(f"{name}={options[name]!r} is for loading, and {why}")
        hint = did_you_mean(name, _ARGUMENTS) or f"; it takes {', '.join(_ARGUMENTS)}"
        raise ParallelError(f"parallelize has no argument {name!r}{hint}")


def read_source(
    path: str, arguments: Mapping[str, Any], model_class: type[PreTrainedModel] | None = None, of_its_own: bool = True
) -> Source:
    """Check arguments of `from_pretrained`, and read or download the configuration of a checkpoint.

    With `trust_remote_code=True`, the configuration code of the checkpoint may run, and may raise any exception.

    Args:
        of_its_own: whether the checkpoint provides the configuration. False if the caller's model on `meta` has a
            configuration; then only arguments about the location are accepted.
    """
    for name in arguments:
        _refuse_by_name(name)
    location = Location(path, **{name: arguments[name] for name in _WHERE if name in arguments})
    rest = {name: value for name, value in arguments.items() if name not in _WHERE}
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not location.directory.is_dir():  # otherwise transformers would search the hub
        raise CheckpointError(f"{location} is no directory")
    if not of_its_own:
        refuse_options(rest, "the model is built already")
        return Source(location)
    trusted = rest.pop("trust_remote_code", False)
    options = {name: rest.pop(name) for name in _OF_THE_MODEL if name in rest}
    with reading_errors(f"{location.directory / 'config.json'} cannot be read"):
        config, unknown = AutoConfig.from_pretrained(
            path, trust_remote_code=trusted, return_unused_kwargs=True, **location.download, **rest
        )
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


def stored_quantization(location: Location) -> dict[str, Any] | None:
    """Return `quantization_config` of a checkpoint's `config.json`; None if the entry or the file is missing."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(location.path, **location.download)
    except OSError as error:  # the directory has weights but no config.json, so nothing says that they are quantized
        raise_if_of_handler(error)
        return None
    return config.get("quantization_config")


def open_weights(location: Location) -> list[CheckpointFile]:
    """Open the files with the weights: one file, or every file that the index names. No weights are read.

    Safetensors files are preferred to `.bin` files. Missing files of a model on the hub are downloaded.
    """
    names = [_add_variant(name, location.variant) for name in _CANDIDATES]
    for name in names:
        with reading_errors(f"{name} of {location} cannot be fetched"):
            file = cached_file(location.path, name, **_NONE_IF_ABSENT, **location.download)
        if file is not None:
            break
    else:
        raise CheckpointError(f"{location} holds none of {', '.join(names)}; the weights must be in one of these files")
    if not file.endswith(".json"):
        return [open_file(file)]
    with reading_errors(f"{file} is damaged"):
        weight_map = json.loads(Path(file).read_text("utf-8")).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{file} is damaged: it has no weight_map from names to files")
        if any(os.path.isabs(name) or ".." in Path(name).parts for name in weight_map.values()):
            raise CheckpointError(f"{file} is damaged: it names a file outside its directory")
    with reading_errors(f"a file that {file} names is missing"):
        paths, _ = get_checkpoint_shard_files(location.path, file, **location.download)
    files = dict(zip(sorted(set(weight_map.values())), map(open_file, paths), strict=True))
    for key, name in weight_map.items():
        if key not in files[name].entries:
            raise CheckpointError(f"{file} lists {key} in {name}, and {name} has no {key}: one of the files is damaged")
    return list(files.values())
