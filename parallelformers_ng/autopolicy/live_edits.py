"""What a program has changed of a model since its class built it, so that a small copy can be given the same code."""

from __future__ import annotations

import copy
import functools
import re
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.reach import functions_in, reach
from parallelformers_ng.live_code.stock import foreign_modules, functions_of, is_stock

_TABLES = frozenset(vars(nn.Module())) | {"training"}


@dataclass(frozen=True)
class _Edit:
    """A module whose code is the program's.

    Attributes:
        module: the module itself, whose tensors are not looked at.
        functions: attribute → function of the program's that the module holds.
    """

    module: nn.Module
    functions: dict[str, Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        return type(self.module), *sorted((name, digest(value)) for name, value in self.functions.items())


class LiveEdits:
    """The modules of a model that run code of the program's.

    A class of the program's own that builds its small copies itself needs no more; functions put on modules, and
    modules put in the place of others, are put on a small copy as well.

    Args:
        model: the model, on any device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        modules = dict(model.named_modules())
        self._edits = {path: _Edit(modules[path], functions_of(modules[path])) for path in foreign_modules(model)}

    def __bool__(self) -> bool:
        return bool(self._edits)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """The same for models with the same code."""
        classes = {type(edit.module) for edit in self._edits.values()}
        slots = reach(classes).values() if classes else ()
        code = frozenset((slot.place, digest(slot.value)) for slot in slots if not is_stock(slot))
        return code, frozenset((_pattern(path), *edit.kind) for path, edit in self._edits.items())

    @property
    def functions(self) -> list[Any]:
        """The functions of the program's that modules hold."""
        return [value for edit in self._edits.values() for value in edit.functions.values()]

    def apply(self, small: nn.Module) -> None:
        """Give a small copy of the model the same code.

        Raises:
            UnsupportedModelError: some of it cannot be had in a small copy.
        """
        there = dict(small.named_modules())
        shown = set()
        for path, edit in self._edits.items():
            if path in there:
                self._put(small, path, there[path], edit)
                shown.add((_pattern(path), edit.kind))
        for path, edit in self._edits.items():
            if (_pattern(path), edit.kind) not in shown:
                raise self._refusal(path, "it has no such layer")

    def _put(self, small: nn.Module, path: str, copied: nn.Module, edit: _Edit) -> None:
        live = edit.module
        if type(live) is not type(copied):
            if not any(True for _ in (*live.parameters(), *live.buffers())):
                small.set_submodule(path, copy.deepcopy(live))
                return
            if not _alike(live, copied):
                raise self._refusal(path, f"a {type(live).__name__} has other weights than a {type(copied).__name__}")
            copied.__class__ = type(live)
            for name in vars(live).keys() - vars(copied).keys() - _TABLES:
                if isinstance(vars(live)[name], (torch.Tensor, nn.Module)):
                    raise self._refusal(path, f"its {name} has the size of the whole")
                vars(copied)[name] = copy.copy(vars(live)[name])
        for name, value in edit.functions.items():
            if any(_holds_module(function) for function in functions_in(value)):
                raise self._refusal(path, f"its {name} holds a module of the whole model")
            is_bound = isinstance(value, types.MethodType) and value.__self__ is live
            vars(copied)[name] = types.MethodType(value.__func__, copied) if is_bound else value

    def _refusal(self, path: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"no tiny twin of {self._name} runs the code of {path or 'the model'}, which the program has changed: {why}"
        )


def _alike(live: nn.Module, copied: nn.Module) -> bool:
    """Whether two modules hold parameters, buffers and children of the same names."""
    return all(vars(live)[t].keys() == vars(copied)[t].keys() for t in ("_parameters", "_buffers", "_modules"))


def _holds_module(function: types.FunctionType) -> bool:
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return any(isinstance(getattr(value, "__self__", value), nn.Module) for value in values)


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "*", path)
