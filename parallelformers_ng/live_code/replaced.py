"""Detects modules and settings that the user swapped after the model's class built the model."""

from __future__ import annotations

import copy
import functools
import re
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.functions import functions_in, names_in
from parallelformers_ng.live_code.object_graph import attributes_of
from parallelformers_ng.live_code.state import holds_module
from parallelformers_ng.origins import package_of
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

PLAIN_LAYERS = (nn.Linear, nn.Embedding, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Harmless outside of blocks; inside a block, such a module may compute over all columns, which no rank has.
_OVER_COLUMNS = (nn.LayerNorm, nn.Sequential)
_ELEMENT_WISE = (
    nn.Dropout, nn.Identity, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Hardswish,
    nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.Softplus,
)  # fmt: skip
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # harmless: containers compute nothing
_HARMLESS = (*PLAIN_LAYERS, *_ELEMENT_WISE, *_OVER_COLUMNS, *_CONTAINERS)
_ELEMENT_WISE_FUNCTIONS = frozenset({
    "relu", "relu6", "gelu", "silu", "mish", "tanh", "sigmoid", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu",
    "elu", "selu", "celu", "softplus", "softsign", "logsigmoid", "sin", "cos", "erf", "square", "abs", "exp", "clamp",
    "clip", "identity",
})  # fmt: skip


def replaced_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return path → description of the torch modules with which the program replaced `modules` of the model.

    Layers and element-wise activations are ignored. In blocks, layer norms and chains with layers are not.
    """
    replaced = {
        path: module
        for path, module in modules.items()
        if package_of(type(module)) == "torch" and not isinstance(module, _HARMLESS)
    }
    replaced |= _unexpected(modules)
    if not replaced or not isinstance(model, PreTrainedModel):
        return {}
    class_of, built = parametrize.type_before_parametrizations, built_modules(model)
    return {
        path: f"the program put a {type(module).__name__} there"
        for path, module in replaced.items()
        if built and (path not in built or class_of(built[path]) is not class_of(module))
    }


def changed_settings(model: nn.Module, path: str) -> dict[str, Any]:
    """Settings of a module that the program set after the class built the model, by name."""
    built = built_modules(model).get(path) if isinstance(model, PreTrainedModel) else None
    if built is None:
        return {}
    settings = {name: value for name, value in vars(model.get_submodule(path)).items() if is_setting(name, value)}
    return {name: value for name, value in settings.items() if digest(vars(built).get(name, built)) != digest(value)}


def is_setting(name: str, value: Any) -> bool:
    """Whether an attribute of a module is a setting: a public number, string, None, list or dictionary, or an object of
    the program. `training` and configurations are none."""
    if name == "training" or name.startswith("_") or hasattr(value, "to_dict"):
        return False
    plain = isinstance(value, (bool, int, float, str, list, dict, types.SimpleNamespace, type(None)))
    return (plain or attributes_of(value) is not None) and not holds_module(value)


def is_torch_function_put_there(module: nn.Module, value: Any) -> bool:
    """Whether an attribute of a transformers module is a torch function that the program put there.

    Element-wise functions do not count, because they compute the same for any share of the columns.
    """
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__name__", "")
    is_builtin = isinstance(value, types.BuiltinFunctionType) and getattr(torch, name, None) is value
    if not name or not (is_builtin or (isinstance(value, types.FunctionType) and package_of(value) == "torch")):
        return False
    return name not in _ELEMENT_WISE_FUNCTIONS and not _is_named_by(type(module), name)


def _unexpected(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Layer norms and chains of layers, in blocks, whose kind the parent's `__init__` does not name."""
    return {
        f"{path}.{name}": child
        for path, module in modules.items()
        if package_of(type(module)) == "transformers" and re.search(r"\.\d+(\.|$)", path)
        for name, child in module.named_children()
        if type(child) in _OVER_COLUMNS
        and not _is_named_by(type(module), type(child).__name__)
        and not (isinstance(child, nn.Sequential) and all(isinstance(part, _ELEMENT_WISE) for part in child))
    }


def _is_named_by(cls: Any, name: str) -> bool:
    return name in _names_in_init(cls)


@functools.cache
def _names_in_init(cls: type) -> frozenset[str]:
    functions = (function for base in cls.__mro__ for function in functions_in(vars(base).get("__init__")))
    return frozenset().union(*(names_in(function.__code__) for function in functions))


_BUILT: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = weakref.WeakKeyDictionary()


def built_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules of a newly built model of the same class, on `meta`, by path; empty if building fails."""
    if model not in _BUILT:
        built = built_on_meta(type(model), model.config)
        if built is None:
            return {}
        _BUILT[model] = dict(built.named_modules())
    return _BUILT[model]


def built_on_meta(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel | None:
    """A new model on `meta`; None if the class refuses the configuration."""
    try:
        with torch.device("meta"):
            return cls._from_config(copy.deepcopy(config))
    except Exception as error:  # modelling code may raise any exception on a configuration that it refuses
        raise_if_of_handler(error)
        return None
