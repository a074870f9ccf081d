"""Defines moves of a walk that change the code of a model: see tests/helpers/walks.py."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import is_parallelized
from tests.helpers.walk_moves import Moves, Step

WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList)


def scaled(states: torch.Tensor) -> torch.Tensor:
    return states * 1.1


def clamped(states: torch.Tensor) -> torch.Tensor:
    return states.clamp(-0.5, 0.5)


def centred(states: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of all columns; a rank with some columns would subtract another mean."""
    return states - states.mean(-1, keepdim=True)


FUNCTIONS = (scaled, clamped, centred)


def changed(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Return a module's output with its first tensor passed through `function`."""
    if isinstance(output, torch.Tensor):
        return function(output) if output.is_floating_point() else output
    if isinstance(output, tuple) and type(output) is tuple:
        return (changed(function, output[0]), *output[1:])
    return output


def followed_by(function: Callable[[torch.Tensor], torch.Tensor], forward: Callable) -> Callable:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return changed(function, forward(*args, **kwargs))

    return call


class Wrapper(nn.Module):
    """A module around a layer, as libraries of adapters use."""

    def __init__(self, inner: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return changed(self.function, self.inner(*args, **kwargs))


class CodeMoves(Moves):
    """A mixin of walks."""

    def code_moves(self) -> list[Callable[[], tuple[str, Step]]]:
        return [self._patch, self._replace_forward, self._wrap, self._subclass]

    def _patch(self) -> tuple[str, Step]:
        """Patch a class before `parallelize` and call, or later, which the call refuses; undo it, and call again."""
        classes = {type(module): None for module in self.whole.modules() if "transformers" in type(module).__module__}
        cls = self._random.choice([cls for cls in classes if "forward" in vars(cls)])
        forward, function = vars(cls)["forward"], self._random.choice(FUNCTIONS[:2])
        before, call = self._random.random() < 0.5, self._call()

        def take(model: Any) -> list[Any]:
            is_cut, patched = is_parallelized(model), None
            cls.forward = followed_by(function, forward)
            try:
                if is_cut and not before:
                    with pytest.raises(ParallelError, match=f"{cls.__name__}.forward was changed after"):
                        call(model)
                elif before:
                    own = copy.deepcopy(self.whole)
                    patched = call(self.parallelize(own) if is_cut else own)
            finally:
                cls.forward = forward
            return [patched, call(model)]

        return f"{cls.__name__}.forward {function.__name__}, {'before' if before else 'after'}", take

    def _replace_forward(self) -> tuple[str, Step]:
        def change(model: nn.Module, path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            module = model.get_submodule(path)
            module.forward = followed_by(function, module.forward)

        return self._with_change("forward of", change, nn.Module)

    def _wrap(self) -> tuple[str, Step]:
        def change(model: nn.Module, path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Wrapper(model.get_submodule(path), function))

        return self._with_change("wrap", change, nn.Module)

    def _subclass(self) -> tuple[str, Step]:
        def change(model: nn.Module, path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            module = model.get_submodule(path)
            cls: Any = type(module)
            members = {"forward": lambda self, *args, **kwargs: changed(function, cls.forward(self, *args, **kwargs))}
            module.__class__ = types.new_class(f"Own{cls.__name__}", (cls,), {}, lambda scope: scope.update(members))

        return self._with_change("subclass", change, (nn.Linear, nn.LayerNorm))

    def _with_change(
        self, what: str, change: Callable[[nn.Module, str, Any], None], kinds: type | tuple[type, ...]
    ) -> tuple[str, Step]:
        """Parallelize a model with up to three changed modules."""
        places = [
            path
            for path, module in self.whole.named_modules()
            if path and isinstance(module, kinds) and not isinstance(module, WITHOUT_FORWARD)
        ]
        paths = self._random.sample(places, min(len(places), self._random.randint(1, 3)))
        function, call = self._random.choice(FUNCTIONS), self._call()

        def take(model: Any) -> Any:
            own = copy.deepcopy(self.whole)
            for path in sorted(paths, reverse=True):  # a child before its parents
                change(own, path, function)
            if is_parallelized(model):
                own = self.parallelize(own)
            return call(own)

        return f"{what} {', '.join(paths)}: {function.__name__}", take
