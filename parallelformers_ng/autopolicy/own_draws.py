"""Gives proofs a separate random generator, so that they do not change the state of the caller's generators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OwnDraws(TorchDispatchMode):
    """Context in which this thread's random operators on CPU draw from a separate generator.

    The numbers are the same as after `torch.manual_seed(seed)`, which would also change what other threads draw.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self.has_drawn = False  # whether an operator has drawn numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with_generator = _with_generator(func)
        if with_generator is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.has_drawn = True
        return with_generator(*args, **{**kwargs, "generator": self._generator})


@functools.cache
def _with_generator(operator: Any) -> Any:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return None
    types = _types(operator)
    if "generator" in types:
        return operator
    overloads = [getattr(operator.overloadpacket, name) for name in operator.overloadpacket.overloads()]
    return next((each for each in overloads if _types(each) == types | {"generator": "Optional[Generator]"}), None)


def _types(operator: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in operator._schema.arguments}
