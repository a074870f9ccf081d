"""Finds out whether code in a call can see this thread's grad mode, or draws from `random` or NumPy.

Most calls run in torch's inference mode, which is fastest, and send no states of these generators.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from parallelformers_ng.live_code.functions import functions_in, names_in
from parallelformers_ng.live_code.object_graph import attributes_of
from parallelformers_ng.live_code.stock import words_of_program
from parallelformers_ng.model.live_code import LiveCode
from parallelformers_ng.origins import is_known
from parallelformers_ng.worker.call import Call
from parallelformers_ng.worker.caller_modes import draw_states

_SEES_GRAD_MODE = frozenset({
    "autograd", "enable_grad", "set_grad_enabled", "is_grad_enabled", "is_inference_mode_enabled", "is_inference",
    "requires_grad", "requires_grad_", "grad", "grad_fn", "backward", "eager_transforms", "jacrev", "jacfwd", "vjp",
    "jvp", "hessian",
})  # fmt: skip
_DRAWS = "random"
_MAX_VALUES = 2000


class Modes:
    """Decides which state of the caller's thread a call must send: grad mode, and states of `random` and NumPy.

    Attributes:
        seen: whether the model's code reads the grad mode, and whether it draws from `random` or NumPy.
    """

    def __init__(self, code: LiveCode) -> None:
        own = [*filter(_is_of_program, code.classes), *code.check.edits.functions]
        self.seen = False, _DRAWS in code.names
        self.add(code.words)
        self.add(words_reached([*own, *(value for _, _, value in code.check.edits.objects())]))
        self._of_roots: weakref.WeakKeyDictionary[Any, tuple[bool, bool]] = weakref.WeakKeyDictionary()

    def add(self, words: frozenset[str]) -> None:
        self.seen = tuple(map(operator.or_, self.seen, _seen_by(words)))

    def are_seen(self, roots: Iterable[Any]) -> tuple[bool, bool]:
        """Whether code of a call reads the grad mode, and whether it draws from `random` or NumPy. `roots` are further
        code of the call: hooks, logits processors, stopping criteria."""
        seen = [self.seen, *map(self._seen_of, roots)]
        return any(grad for grad, _ in seen), any(draws for _, draws in seen)

    def put_into(self, call: Call, roots: Iterable[Any]) -> None:
        sees_grad_mode, draws = self.are_seen(roots)
        if sees_grad_mode and not torch.is_inference_mode_enabled():
            call.grad = torch.is_grad_enabled()
        if draws:
            call.draws = draw_states()

    def _seen_of(self, root: Any) -> tuple[bool, bool]:
        try:
            if root not in self._of_roots:
                self._of_roots[root] = _seen_by(words_reached([root]))
            return self._of_roots[root]
        except TypeError:  # the object is unhashable or has no weak references
            return _seen_by(words_reached([root]))


def _seen_by(words: frozenset[str]) -> tuple[bool, bool]:
    return not words.isdisjoint(_SEES_GRAD_MODE), _DRAWS in words


def words_reached(values: Iterable[Any]) -> frozenset[str]:
    """Return the names and strings in all code of the user that these values can run.

    The search follows functions, classes, objects and containers, and the global variables that the code names.
    """
    words, seen, pending = set[str](), dict[int, Any](), [*values]
    while pending and len(seen) < _MAX_VALUES:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (nn.Module, torch.Tensor, np.ndarray, str, bytes, int, float)):
            continue
        seen[id(value)] = value  # an id is unique only while the object lives
        if isinstance(value, type):
            if _is_of_program(value):
                pending += [part for base in value.__mro__ if _is_of_program(base) for part in vars(base).values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif (attributes := attributes_of(value)) is not None:
            pending += [type(value), *attributes.values()]
        if isinstance(value, types.MethodType):
            pending.append(value.__self__)
        for function in functions_in(value):
            if is_known(function):
                continue
            words |= words_of_program([function])
            pending += [function.__defaults__, function.__kwdefaults__]
            pending += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
            names = names_in(function.__code__)
            for part in (function.__globals__[name] for name in names if name in function.__globals__):
                home = part.__name__ if isinstance(part, types.ModuleType) else _home_of(part)
                words.update(home.split("."))
                if not isinstance(part, types.ModuleType):
                    pending.append(part)
                elif not is_known(part):
                    pending += [vars(part)[name] for name in names if name in vars(part)]
    return frozenset(words)


def _home_of(value: Any) -> str:
    """Return the name of the module that defines a function or, for a method such as `random.choice`, its class."""
    return str(getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__)


def _is_of_program(cls: type) -> bool:
    return not is_known(cls)
