"""Finds the arguments of a call that may be objects of the user."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from parallelformers_ng.generation.caches import PLAIN
from parallelformers_ng.wire.frame import Handle
from parallelformers_ng.wire.message import TENSOR_CLASSES

# Arguments of `generate` whose objects may run code of the user.
STATEFUL = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


def code_of(root: Any) -> Any:
    """Return the function that a call of `root` runs; `root` is a function, method, `partial` or another object."""
    while isinstance(root, functools.partial):
        root = root.func
    if isinstance(root, types.MethodType):
        return root.__func__
    return root if isinstance(root, types.FunctionType) else getattr(type(root), "__call__", None)  # noqa: B004 (the function itself is needed)


def stateful_arguments(kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the user's logits processors, stopping criteria and other callables; None for an absent argument."""
    for name in STATEFUL:
        value = kwargs.get(name)
        yield from value if isinstance(value, (list, tuple)) else [value]


@functools.cache
def _settings() -> frozenset[str]:
    return frozenset(vars(GenerationConfig()))


def roots_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that may be objects of the user, without `generate` options, tensors, caches, numbers."""
    values = (*args, *(value for name, value in kwargs.items() if name not in _settings()))
    return [value for value in values if not isinstance(value, (*PLAIN, Handle, Cache))]


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if type(value) in TENSOR_CLASSES]
