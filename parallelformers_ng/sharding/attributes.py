"""Sets attributes of a rank's modules, and of the configurations (`config`) that the modules read."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from parallelformers_ng.errors import ParallelError

_COPY_OF = "_parallelformers_ng_copy_of"


class Removed(enum.Enum):
    """Marker that stands for the value of an attribute that the caller deleted."""

    REMOVED = enum.auto()


REMOVED = Removed.REMOVED


@dataclass
class NewBuffer:
    """A buffer that the model's code registered during a call, to be registered in another process as well."""

    tensor: torch.Tensor
    persistent: bool


class _NoAttributeError(ParallelError, AttributeError):
    """Raised instead of returning an attribute of an `OnWorkers`; an AttributeError, so that `hasattr` works."""


class OnWorkers:
    """Placeholder in the caller for a value that the model's code set on the workers and that cannot be sent.

    Every use of the placeholder raises ParallelError with the text `why`.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def __repr__(self) -> str:
        return f"<{self._why}>"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ParallelError(self._why)

    def __getattr__(self, name: str) -> Any:
        raise _NoAttributeError(vars(self).get("_why", name))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ParallelError(next((each._why for each in args if isinstance(each, cls)), "a value is on the workers"))

    __hash__ = object.__hash__


_OPERATORS = (
    "add and bool call contains delitem eq float floordiv ge getitem gt index int invert iter le len lt matmul mod mul"
    " ne neg next or pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub rtruediv rxor setitem str sub truediv xor"
)
for _name in _OPERATORS.split():
    setattr(OnWorkers, f"__{_name}__", OnWorkers._refuse)


def put_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object, or delete it if `value` is REMOVED and the object has it."""
    if isinstance(value, NewBuffer):
        owner.register_buffer(name, value.tensor, value.persistent)
    elif value is not REMOVED:
        setattr(owner, name, value)
    elif name in getattr(owner, "__dict__", {}):
        delattr(owner, name)


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute by its dotted path from a module, such as "config.num_heads".

    A `config` on the path is copied first, so that other modules keep the original.
    """
    owner: Any = module
    *path, last = name.split(".")
    for part in path:
        if part == "config":
            whole = getattr(owner, part)
            setattr(owner, part, copy.copy(whole))
            vars(getattr(owner, part)).setdefault(_COPY_OF, whole)
        owner = getattr(owner, part)
    setattr(owner, last, value)


def set_config(model: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a configuration, by its dotted path from the model; REMOVED as value deletes the attribute.

    The copies of the configuration that `set_attribute` made get the value too, if they had the original's value.
    """
    owner, _, last = name.rpartition(".")
    target = attrgetter(owner)(model)
    whole = getattr(target, _COPY_OF, target)
    before = getattr(whole, last, None)
    for config in (whole, *(module.__dict__.get("config") for module in model.modules())):
        if (config is whole or getattr(config, _COPY_OF, None) is whole) and are_equal(
            getattr(config, last, None), before
        ):
            put_attribute(config, last, value)


def are_equal(one: Any, other: Any) -> bool:
    """Return `one == other`; compare pickles if that raises, as it does for tensors and arrays with several items."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return pickle.dumps(one) == pickle.dumps(other)


CONFIGURATIONS = ("config", "generation_config")  # names of the attributes in which transformers keeps configurations


def owners_of_configurations(model: nn.Module) -> list[tuple[str, str]]:
    """Return (module path, attribute name) of every configuration of a model, the top module's configurations first.

    Submodules are searched too: T5's encoder has a copy of the configuration, and a nested language model may have its
    own generation configuration.
    """
    seen: set[int] = set()
    owners = []
    for path, module in model.named_modules():
        for name in CONFIGURATIONS:
            config = vars(module).get(name)
            if (not path and hasattr(module, name)) or (hasattr(config, "to_dict") and id(config) not in seen):
                seen |= {id(part) for _, part in parts_of(config, "")}
                owners.append((path, name))
    return owners


def parts_of(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (prefix of the dotted names of attributes, configuration) for a configuration and its sub-configurations.

    With the prefix "config.", the sub-configuration `text_config` has the prefix "config.text_config.".
    """
    if config is not None:
        yield prefix, config
        for name, value in vars(config).items():
            if name != _COPY_OF and hasattr(value, "to_dict") and hasattr(value, "model_type"):
                yield from parts_of(value, f"{prefix}{name}.")


def configurations(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (prefix of the dotted names of attributes, configuration) for all configurations of a rank's model.

    A copy that `set_attribute` made has the prefix of the original.
    """
    prefixes: dict[int, str] = {}
    for path, name in owners_of_configurations(model):
        config = getattr(model.get_submodule(path), name)
        for prefix, part in parts_of(config, f"{path}.{name}.".lstrip(".")):
            yield prefixes.setdefault(id(vars(part).get(_COPY_OF, part)), prefix), part
