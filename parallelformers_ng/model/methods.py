"""Decides for each method of a parallelized model: run it on the workers, run it in this process, or refuse it.

docs/methods.md lists the decision for each method by name; a test compares that page with this module.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from parallelformers_ng.live_code.functions import functions_in, names_in
from parallelformers_ng.origins import CORE, is_known, package_of
from parallelformers_ng.sharding.layer_uses import WEIGHTS_AND_WIDTHS, reads_attributes

Place = Literal["local", "forwarded", "generated", "refused", "saved", "switched"]

_CHANGES = "changes weights that the workers hold"
_ADDS = "adds weights that the workers do not have"
_REASONS = {
    "changes the shape of weights that are cut": ("resize_token_embeddings", "resize_position_embeddings"),
    "draws new weights": ("init_weights", "initialize_weights", "post_init"),
    "writes weights that the workers hold": ("load_state_dict",),
    "removes weights that the workers hold": ("delete_adapter",),
    "drops weights that the workers hold": ("to_empty",),
    "prepares adapters, whose weights the workers do not have": ("enable_peft_hotswap",),
    'compiles modules that have no weights here; pass decode="compile" to parallelize': ("compile",),
    "is for training, and the workers compute without gradients": (
        "gradient_checkpointing_enable", "activation_checkpointing_enable", "enable_input_require_grads",
    ),
    "changes modules on the workers; pass it to from_pretrained": (
        "set_attn_implementation", "set_experts_implementation", "set_use_kernels",
    ),
    "drives the model's modules itself; call generate": (
        "generate_batch", "continuous_batching_context_manager", "init_continuous_batching",
    ),
    "writes files by itself; call save_pretrained, then upload the directory": ("push_to_hub",),
    "writes weights by itself; call save_pretrained or save_sharded": ("save_distributed_checkpoint",),
    "replaces a module, and the modules are on the workers": ("set_submodule",),
    "adds a module, and the modules are on the workers": ("add_module", "register_module"),
    "adds a weight that the workers do not have": ("register_parameter",),
    "adds a tensor that the workers do not have": ("register_buffer",),
    "writes state that the workers hold": ("set_extra_state",),
    _ADDS: ("load_adapter", "add_adapter"),
    _CHANGES: ("dequantize",),
}  # fmt: skip
REFUSED = {method: reason for reason, methods in _REASONS.items() for method in methods}
"""Method → reason why the method raises ParallelError while the model is parallelized."""

REFUSED_OF_PEFT = {
    **dict.fromkeys(("merge", "unmerge", "merge_and_unload", "unload", "merge_adapter", "unmerge_adapter"), _CHANGES),
    **dict.fromkeys(("update_layer", "inject_adapter", "add_weighted_adapter", "subtract_mutated_init"), _ADDS),
}
"""Method of peft's classes → reason why the method raises ParallelError; other classes may use these names."""
SWITCHES = (
    "set_adapter", "enable_adapters", "disable_adapters", "enable_adapter_layers", "disable_adapter_layers",
    "set_scale", "scale_layer", "unscale_layer",
)  # fmt: skip
"""Methods that switch or scale adapters in this process; each later call sends the active adapters to the workers."""

_PLACES: dict[str, Place] = {
    **dict.fromkeys((*dir(nn.Module), *dir(PreTrainedModel), *dir(GenerationMixin)), "local"),
    **dict.fromkeys(REFUSED, "refused"),
    **dict.fromkeys(SWITCHES, "switched"),
    "forward": "forwarded",
    "generate": "generated",
    "save_pretrained": "saved",
}
"""Method of torch's or transformers' base classes → place. Most methods of base classes only manage attributes, and
therefore run in this process, also if a model family overrides the method."""

_ACCESSORS = frozenset({"get_bias", "get_prefix_bias_name", "set_default_language"})
"""Methods of modelling code that compute nothing."""


def place_of(cls: type, name: str) -> Place:
    """Decide where the public method `name` of a module class runs while its model is parallelized.

    A method that only modelling code defines runs on the workers, because it computes with weights; accessors do not.
    """
    defining = next((parent for parent in cls.__mro__ if name in vars(parent)), object)
    if name in _PLACES:
        is_own_saving = _PLACES[name] == "saved" and not is_known(defining)
        return "local" if is_own_saving else _PLACES[name]
    library = package_of(defining)
    if library == "peft" and name in REFUSED_OF_PEFT:
        return "refused"
    is_of_library = library in CORE | {"builtins", "peft"}
    is_modelling_code = not is_of_library or defining.__module__.startswith("transformers.models.")
    function = vars(defining).get(name)
    computes = isinstance(function, types.FunctionType) and name not in _ACCESSORS and not _is_lazy(function)
    return "forwarded" if is_modelling_code and computes else "local"


def _is_lazy(function: Callable) -> bool:
    """Whether a call only makes a generator, a coroutine or a context manager. Its body must run in the caller's
    process, which resumes it; the modules that the body calls run on the workers."""
    function = inspect.unwrap(function)
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds)


OPTIONS = ("seed", "timeout", "streamer", "priority")
"""Arguments that every call of `generate` takes, unless the `generate` of the model's class takes them itself."""


@functools.cache
def options_of_class(generate: Any) -> frozenset[str]:
    """Names in `OPTIONS` that a class's own `generate` takes: as parameters, or by name from `**kwargs`."""
    function = inspect.unwrap(generate)
    if function is inspect.unwrap(GenerationMixin.generate) or not isinstance(function, types.FunctionType):
        return frozenset()
    code = function.__code__
    strings = {constant for constant in code.co_consts if isinstance(constant, str)}
    return frozenset(OPTIONS) & strings.union(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def is_streamer(value: Any) -> bool:
    return hasattr(value, "put") and hasattr(value, "end")


def public_methods(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]


@functools.cache
def generates(cls: Any, method: Callable) -> bool:
    """Whether a method calls `generate`, also through other methods of its class, and so accepts its arguments."""
    return any("generate" in function.__code__.co_names for function in _with_called(cls, method))


_OF_WEIGHTS = WEIGHTS_AND_WIDTHS | {
    "bias", "parameters", "named_parameters", "num_parameters", "state_dict", "get_parameter",
}  # fmt: skip


@functools.cache
def reads_weights(cls: Any, method: Callable) -> bool:
    """Return whether a method of the program reads weights or widths, directly or through other methods of its class.
    Such a method must run in the caller's process, because each worker has only shards of the weights."""
    functions = _with_called(cls, method, without=frozenset({"forward", "generate"}))
    return any(not is_known(each) and reads_attributes(each.__code__, _OF_WEIGHTS) for each in functions)


def _with_called(cls: Any, method: Callable, without: frozenset[str] = frozenset()) -> set[types.FunctionType]:
    """Return a method, and all methods of its class that the method calls by name, directly or indirectly."""
    functions: set[types.FunctionType] = set()
    values: list[Any] = [method]
    while values:
        for function in set(functions_in(values.pop())) - functions:
            functions.add(function)
            values += [inspect.getattr_static(cls, name, None) for name in names_in(function.__code__) - without]
    return functions
