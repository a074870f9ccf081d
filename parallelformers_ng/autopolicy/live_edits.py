"""Applies to a small copy the code changes that a program made to a model after the class built the model."""

from __future__ import annotations

import copy
import functools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
from torch import nn

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.reach import reach
from parallelformers_ng.live_code.replaced import changed_settings, is_setting
from parallelformers_ng.live_code.state import State, holds_module
from parallelformers_ng.live_code.stock import foreign_modules, functions_of, is_of_program, is_stock, words_of_program
from parallelformers_ng.sharding.attributes import REMOVED
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_TABLES = frozenset(vars(nn.Module())) | {"training"}


class _Edit:
    """The class, functions and settings of a module with foreign code, to be put on a module of a small copy.

    Args:
        settings: name of an attribute → number or string that the program set.
    """

    def __init__(self, module: nn.Module, settings: dict[str, Any]) -> None:
        self.cls = type(module)
        # attributes of the module object by name, except parameters, buffers and child modules
        self.attributes = {name: value for name, value in vars(module).items() if name not in _TABLES}
        self.names = _names_in(module)
        self.functions = functions_of(module)  # functions that the program assigned to attributes, by attribute name
        # names of the functions that are bound to this module
        self.bound = {name for name, value in self.functions.items() if getattr(value, "__self__", None) is module}
        has_tensors = any(True for _ in (*module.parameters(), *module.buffers()))
        self.itself = None if has_tensors else _copied(module, copy.deepcopy, None)
        self.settings = settings

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.cls, *sorted((name, digest(value)) for name, value in (self.settings | self.functions).items())


def _names_in(module: nn.Module) -> list[list[str]]:
    return [[*table] for table in (module._parameters, module._buffers, module._modules)]


def _copied(value: Any, make: Callable[[Any], Any], otherwise: Any) -> Any:
    try:
        return make(value)
    except Exception as error:  # copying an attribute of the program may raise any exception
        raise_if_of_handler(error)
        return otherwise


class LiveEdits:
    """The modules of a model whose code neither torch nor transformers defines.

    A model class with foreign code also builds the small copy, so the copy has the same code. Functions that the
    program assigned to modules, and modules that the program replaced, must be applied to a small copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        modules = dict(model.named_modules())
        self._edits = {path: _Edit(modules[path], changed_settings(model, path)) for path in foreign_modules(model)}

    def __bool__(self) -> bool:
        return bool(self._edits)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key for a cache of results: two models with equal code have equal keys."""
        classes = {edit.cls for edit in self._edits.values()}
        slots = reach(classes).values() if classes else ()
        code = frozenset(
            (slot.place, digest(slot.value)) for slot in slots if is_of_program(slot.place) or not is_stock(slot)
        )
        return code, frozenset((_pattern(path), *edit.kind) for path, edit in self._edits.items())

    @property
    def functions(self) -> list[Any]:
        """The functions that the program assigned to modules."""
        return [value for edit in self._edits.values() for value in edit.functions.values()]

    def objects(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (module path, attribute name, value) of modules with foreign code.

        A private attribute is yielded only if its name occurs in the program's code."""
        words = self.words
        for path, edit in self._edits.items():
            for name, value in edit.attributes.items():
                is_read = not name.startswith("_") or name in words
                if is_read and name not in edit.functions and not hasattr(value, "to_dict"):
                    yield path, name, value

    @functools.cached_property
    def words(self) -> set[str]:
        """Names and string constants in the program's functions, and in methods of foreign classes."""
        classes = {base for edit in self._edits.values() for base in edit.cls.__mro__}
        return words_of_program((*(value for cls in classes for value in vars(cls).values()), *self.functions))

    def functions_by_path(self) -> Iterator[tuple[str, str, Any]]:
        for path, edit in self._edits.items():
            for name, value in edit.functions.items():
                yield path, name, value.__func__ if name in edit.bound else value

    def set(self, path: str, name: str, value: Any) -> None:
        """Record that the program set a module's attribute after construction; ignore modules without foreign code."""
        edit = self._edits.get(path)
        if edit is not None and value is REMOVED:
            edit.attributes.pop(name, None)
            edit.settings.pop(name, None)
        elif edit is not None:
            edit.attributes[name] = value
            if is_setting(name, value):
                edit.settings[name] = value

    def apply(self, small: nn.Module) -> None:
        """Apply the program's changes to a small copy of the model.

        Raises:
            UnsupportedModelError: a change cannot be applied to a small copy.
        """
        small_modules = dict(small.named_modules())
        applied = set()
        for path, edit in self._edits.items():
            if path in small_modules:
                self._put(small, path, small_modules[path], edit)
                applied.add((_pattern(path), edit.kind))
        for path, edit in self._edits.items():
            if (_pattern(path), edit.kind) not in applied:
                raise self._refusal(path, "the twin has no such layer")

    def _put(self, small: nn.Module, path: str, copied: nn.Module, edit: _Edit) -> None:
        if edit.cls is not type(copied):
            if edit.itself is not None:
                small.set_submodule(path, copy.deepcopy(edit.itself))
                return
            if edit.names != _names_in(copied):
                raise self._refusal(
                    path, f"a {edit.cls.__name__} has other weights than a {type(copied).__name__}, or cannot be copied"
                )
            copied.__class__ = edit.cls
            for name in edit.attributes.keys() - vars(copied).keys():
                if isinstance(edit.attributes[name], (torch.Tensor, nn.Module)):
                    raise self._refusal(path, f"its {name} has the size of the whole model")
                vars(copied)[name] = copy.copy(edit.attributes[name])
        vars(copied).update(copy.deepcopy(edit.settings))
        for name, value in edit.functions.items():
            if holds_module(value.__func__ if name in edit.bound else value):
                raise self._refusal(path, f"its {name} holds a module of the whole model")
            vars(copied)[name] = types.MethodType(value.__func__, copied) if name in edit.bound else _isolated(value)

    def _refusal(self, path: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"no tiny twin of {self._name} runs the code of {path or 'the model'}, which the program has changed: {why}"
        )


def _isolated(function: Any) -> Any:
    """Copy a function and the mutable objects it reads, so that a twin's run does not change the program's objects.

    A function that reads none, or that cannot be copied, is returned itself."""
    if not State(function):
        return function
    return _copied(function, lambda each: cloudpickle.loads(cloudpickle.dumps(each)), function)


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "*", path)
