"""The further arguments of `parallelize`: those of `from_pretrained`, each of which acts or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from parallelformers_ng.checkpoint.location import Location, check_directory, read_config
from parallelformers_ng.errors import ParallelError, did_you_mean
from parallelformers_ng.options import WorkerOptions

_WHERE = tuple(each.name for each in dataclasses.fields(Location) if each.name != "path")
_OF_THE_MODEL = ("attn_implementation", "experts_implementation", "key_mapping", "ignore_mismatched_sizes")
_FOR_LOADING = (*_WHERE, *_OF_THE_MODEL, "trust_remote_code")
_ARGUMENTS = (
    "num_gpus", "fp16", "weights", "model_class", "dtype", "custom_policies", "workers", "decode", "seed", "prove",
    "verbose", "progress",
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
    "quantization_config": "quantized weights cannot be cut yet",
    "load_in_8bit": "quantized weights cannot be cut yet",
    "load_in_4bit": "quantized weights cannot be cut yet",
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
    **{each.name: f"pass workers={{{each.name!r}: …}}" for each in dataclasses.fields(WorkerOptions)},
}


@dataclass
class Source:
    """A checkpoint of which nothing but the configuration has been read.

    Attributes:
        location: where it is.
        config: its configuration, with the attributes that were passed; None where the model brings its own.
        trust_remote_code: allow code that comes with it to run here.
        options: further arguments of `from_pretrained`.
        model_class: the class to load; None is the one that the configuration names.
    """

    location: Location
    config: PreTrainedConfig | None = None
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    model_class: type[PreTrainedModel] | None = None


def refuse_options(given: Mapping[str, Any], why: str) -> None:
    """Raise ParallelError for arguments of `from_pretrained` where nothing is loaded with them, and unknown ones."""
    for name in given:
        _refuse_by_name(name)
        if name in _FOR_LOADING:
            raise ParallelError(f"{name}={given[name]!r} is for loading, and {why}")
        hint = did_you_mean(name, _ARGUMENTS) or f"; it takes {', '.join(_ARGUMENTS)}"
        raise ParallelError(f"parallelize has no argument {name!r}{hint}")


def read_source(
    path: str,
    given: Mapping[str, Any],
    model_class: type[PreTrainedModel] | None = None,
    of_its_own: bool = True,
) -> Source:
    """Check arguments of `from_pretrained`, and read the configuration.

    Args:
        path: a directory or a model id of the hub.
        given: name → value. What is an attribute of the configuration overrides it.
        model_class: as in `Source`.
        of_its_own: False where a model on `meta` has the configuration; then only where the files are can be said.

    Raises:
        ParallelError: an argument that is unknown, or refused here.
        CheckpointError: there is no such directory, or its configuration is missing or damaged.
    """
    for name in given:
        _refuse_by_name(name)
    location = Location(path, **{name: given[name] for name in _WHERE if name in given})
    rest = {name: value for name, value in given.items() if name not in _WHERE}
    check_directory(location)
    if not of_its_own:
        refuse_options(rest, "the model is built already")
        return Source(location)
    trusted = rest.pop("trust_remote_code", False)
    options = {name: rest.pop(name) for name in _OF_THE_MODEL if name in rest}
    config, unknown = read_config(location, trusted, rest)
    for name in unknown:
        known = (*_ARGUMENTS, *_FOR_LOADING, *config.to_dict(), "num_labels")
        raise ParallelError(
            f"{name!r} is neither an argument of parallelize or from_pretrained nor an attribute of"
            f" {type(config).__name__}{did_you_mean(name, known)}"
        )
    return Source(location, config, trusted, options, model_class)


def _refuse_by_name(name: str) -> None:
    if name in _INSTEAD:
        raise ParallelError(f"parallelize takes no {name}: {_INSTEAD[name]}")
