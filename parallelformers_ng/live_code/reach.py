"""Lists the code that a model can run: functions of its classes, and the global variables that the functions name."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.generic import GeneralInterface

from parallelformers_ng.live_code.functions import functions_in, globals_in, names_in, words_in
from parallelformers_ng.live_code.holders import entries_of
from parallelformers_ng.live_code.object_graph import PLAIN, children_of
from parallelformers_ng.origins import KNOWN, is_known, is_library, package_of

# Python calls these methods first in a forward pass.
STEP = frozenset({"forward", "__call__"})
_FOLLOWED_LIBRARY = "transformers"
_GENERAL = {nn.Module, PreTrainedModel, GenerationMixin, object}
_NOT_FOLLOWED = frozenset({"__init__", "__init_subclass__", "from_pretrained", "save_pretrained", "push_to_hub"})
# Modules of transformers for loading, writing, describing or training; their code is not followed.
_NOT_COMPUTING = tuple(
    f"transformers.{name}"
    for name in (
        "configuration_utils", "conversion_mapping", "core_model_loading", "distributed", "dynamic_module_utils",
        "generation.continuous_batching", "generation.watermarking", "integrations.accelerate", "integrations.peft",
        "integrations.tensor_parallel", "loss", "processing_utils", "quantizers", "tokenization",
        "utils.auto_docstring", "utils.doc", "utils.hub", "utils.import_utils", "utils.logging",
        "utils.quantization_config",
    )
)  # fmt: skip
_LAYERS_OF_TORCH = "torch.nn.modules."
_CACHES = "transformers.cache_utils"
_MAX_ENTRIES = 200
_OF_NO_CODE = (*PLAIN, torch.Tensor, nn.Module)


@dataclass(frozen=True)
class Slot:
    """A class attribute, global variable or registry entry that a model's code looks up by name, and its value.

    Attributes:
        place: name of the slot: `module:Class.attribute`, `module:global` or `module:registry[key]`.
        holder: class, module globals or registry that contains the value.
        key: name of the value in `holder`.
        value: value when the slot was recorded.
        of_step: whether a forward pass uses the value; if not, only `generate` and other methods use it.
    """

    place: str
    holder: Any
    key: str
    value: Any
    of_step: bool

    @functools.cached_property
    def functions(self) -> tuple[types.FunctionType, ...]:
        """The Python functions that run if the value is called or read."""
        return tuple(functions_in(self.value))


def reach(
    classes: Iterable[type], functions: Iterable[Any] = (), attentions: Collection[str] | None = None
) -> dict[str, Slot]:
    """List the slots of all code that methods of these classes can run.

    A method is listed if listed code contains the name of the method, for an object of any class. Global variables are
    followed into transformers, and into the packages of the classes and functions. torch's code is not followed, but
    the functions that torch's layers name are listed. Of modules of the program, values are listed, too.

    Args:
        functions: further functions, and objects with methods, that modules have as attributes.
        attentions: names of the attention functions whose code is followed; None for all registered functions.

    Returns:
        Name → slot. Slots that a forward pass uses come first.
    """
    walk = _Walk([*classes], [*functions], attentions)
    walk.follow(STEP | {"__init__"}, of_step=True)  # __init__ of caches, which names the classes of cache layers
    own = {base for cls in walk.classes for base in cls.__mro__ if base not in _GENERAL}
    public = {name for base in own for name in vars(base) if not name.startswith("_")}
    walk.follow(public | {"generate"}, of_step=False)
    return walk.slots


def scopes_of(classes: Iterable[type], functions: Iterable[Any] = ()) -> dict[str, list[dict[str, Any]]]:
    """The globals dictionaries of all functions that `forward`, `__call__` and `generate` can call, by module name.

    Functions that were pickled by value have their own globals, which an import of the module does not find.
    """
    walk = _Walk([*classes], [*functions], None)
    walk.follow(STEP | {"generate"}, of_step=True)
    return {name: [*scopes.values()] for name, scopes in walk.scopes.items()}


class _Walk:
    """A search for all code that a model can call: it follows each name in a function to all functions of that name."""

    def __init__(self, classes: list[type], functions: list[Any], attentions: Collection[str] | None) -> None:
        self._attentions = attentions
        self.slots: dict[str, Slot] = {}
        self.scopes: dict[str, dict[int, dict[str, Any]]] = {}
        self.classes = list(dict.fromkeys(classes))
        self._packages = {_FOLLOWED_LIBRARY} | {
            package_of(part) for part in (*classes, *functions) if not is_known(part)
        }
        self._named: set[str] = set()
        self._methods: dict[str, list[type]] = {}
        self._known: set[int] = set()
        self._functions: set[types.FunctionType] = set()
        self._registries: set[int] = set()
        self._known_classes: set[type] = set()
        self._pending = [*functions]
        self._of_step = True
        for cls in self.classes:
            self._add(cls)

    def follow(self, names: Set[str], of_step: bool) -> None:
        """Record all code that methods of these names can call."""
        self._of_step = of_step
        self._name(names)
        while self._pending:
            value = self._pending.pop()
            if isinstance(value, type):
                self._add(value)
            elif not is_library(type(value).__module__):
                self._add(type(value))
            for function in functions_in(value):
                if function not in self._functions:
                    self._functions.add(function)
                    self._read(function)
            for part in _contents(value):
                if id(part) not in self._known and not isinstance(part, _OF_NO_CODE) and len(self._known) < _MAX_PARTS:
                    self._known.add(id(part))
                    self._pending.append(part)

    def _add(self, cls: type) -> None:
        """Register the methods of a class by name."""
        for base in cls.__mro__:
            if base in self._known_classes:
                continue
            of_program = not is_library(base.__module__)
            followed = (
                of_program
                or package_of(base) in self._packages
                or (package_of(base) == "torch" and issubclass(base, nn.Module))
            )
            if not followed or base.__module__.startswith(_NOT_COMPUTING):
                continue
            self._known_classes.add(base)
            for name, value in vars(base).items():
                is_setting = isinstance(value, (int, float, str)) and issubclass(base, nn.Module)
                is_setting = is_setting or (of_program and not name.startswith("__"))
                skipped = name in _NOT_FOLLOWED and not (name == "__init__" and base.__module__ == _CACHES)
                if skipped or not (is_setting or next(functions_in(value), None)):
                    continue
                self._methods.setdefault(name, []).append(base)
                if name in self._named:
                    self._note_method(base, name)

    def _name(self, names: Set[str]) -> None:
        for name in names - self._named:
            self._named.add(name)
            for owner in self._methods.get(name, ()):
                self._note_method(owner, name)
            method = vars(torch.Tensor).get(name)  # the program may have added a method to tensors
            if isinstance(method, types.FunctionType) and package_of(method) != "torch":
                self._note(f"torch:Tensor.{name}", torch.Tensor, name, method)

    def _read(self, function: types.FunctionType) -> None:
        scope = function.__globals__
        module = scope.get("__name__", "")
        functional = scope.get("F")  # of a torch layer, only the functions of `torch.nn.functional` count
        if module.startswith(_LAYERS_OF_TORCH) and isinstance(functional, types.ModuleType):
            self._read_module(functional, names_in(function.__code__))
        if package_of(function) in KNOWN - self._packages or module.startswith(_NOT_COMPUTING):
            return
        self.scopes.setdefault(module, {})[id(scope)] = scope
        names, of_program = names_in(function.__code__), not is_library(module)
        # An attribute in the program's code, such as `.model`, may have the name of an unrelated global variable.
        own = globals_in(function.__code__) if of_program else names
        read = names | words_in(function.__code__) if of_program else names  # getattr takes names as strings
        for name in (read - names) & scope.keys():  # globals()["NAME"]
            if not callable(scope[name]) and not isinstance(scope[name], types.ModuleType):
                self._note(f"{module}:{name}", scope, name, scope[name])
        self._name(names)
        # A function may import a module itself.
        for name in (names - scope.keys()) & sys.modules.keys() if of_program else ():
            self._read_module(sys.modules[name], read, of_program)
        for name in own & scope.keys():
            if name.startswith("__"):
                continue
            value = scope[name]
            if isinstance(value, types.ModuleType):
                self._read_module(value, read, of_program)
            if of_program or not isinstance(value, types.ModuleType):
                self._note(f"{module}:{name}", scope, name, value)
            if isinstance(value, (GeneralInterface, dict)):
                self._read_registry(f"{module}:{name}", value)

    def _read_module(
        self,
        module: types.ModuleType,
        names: frozenset[str],
        for_program: bool = False,
        above: frozenset[types.ModuleType] = frozenset(),
    ) -> None:
        """Record the functions of a module that code names, for example `silu` for the code `nn.functional.silu`.

        Of a module of the program, record all values.
        """
        of_program = not is_library(module.__name__)
        is_followed = of_program or package_of(module) in self._packages | {"torch"}
        if module in above or not (is_followed or for_program):
            return
        if of_program:
            self.scopes.setdefault(module.__name__, {})[id(vars(module))] = vars(module)
        for name in names & vars(module).keys():
            value = vars(module)[name]
            is_module = isinstance(value, types.ModuleType)
            if is_module:
                self._read_module(value, names, for_program, above | {module})
            if (of_program and not name.startswith("__")) or (
                callable(value) and not is_module and not isinstance(value, type)
            ):
                self._note(f"{module.__name__}:{name}", vars(module), name, value)

    def _read_registry(self, place: str, registry: Any) -> None:
        """Record the functions of a registry, for example transformers' attention functions."""
        if id(registry) in self._registries or len(registry) > _MAX_ENTRIES:
            return
        self._registries.add(id(registry))
        for key, value in entries_of(registry):
            if isinstance(value, type) and value.__module__ == _CACHES:
                self._add(value)
            if isinstance(key, str) and callable(value) and not isinstance(value, type):
                is_named = self._attentions is None or key in self._attentions
                self._note(f"{place}[{key}]", registry, key, value, isinstance(registry, GeneralInterface) and is_named)

    def _note_method(self, owner: type, name: str) -> None:
        self._note(f"{owner.__module__}:{owner.__qualname__}.{name}", owner, name, vars(owner)[name])

    def _note(self, place: str, holder: Any, key: str, value: Any, is_followed: bool = True) -> None:
        """Record a slot, and later search the code of its value."""
        known = self.slots.get(place)
        if known is None:
            self.slots[place] = Slot(place, holder, key, value, self._of_step)
        if is_followed and (known is None or known.value is not value):
            self._pending.append(value)


def module_of(place: str) -> str:
    return place.partition(":")[0]


def package_named_in(place: str) -> str:
    return module_of(place).partition(".")[0]


_MAX_ITEMS = 1_000
_MAX_PARTS = 10_000


def _contents(value: Any) -> Iterable[Any]:
    """Return the values directly inside an object; nothing for a container of more than 1,000 items."""
    return (
        () if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > _MAX_ITEMS else children_of(value)
    )
