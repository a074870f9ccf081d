"""Tensors that remember how they were made instead of being made.

transformers' own loading code runs on them in the parent: it renames, stacks, splits, casts, ties and reports missing
keys as ever, and what comes out are not weights but, for every parameter, the expression that a worker then reads its
slice of (`nodes`). Whatever conversion a model family needs is thereby known, today's and tomorrow's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from parallelformers_ng.checkpoint.nodes import Node, Operation, release
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import UnsupportedModelError

_SAME_VALUES = ("aten.alias.default", "aten.detach.default", "aten.clone.default")


class LazyTensor(torch.Tensor):
    """A CPU tensor without memory.

    Args:
        node: what it stands for.
        stride: strides that operations on it shall assume; contiguous by default.
    """

    node: Node

    @staticmethod
    def __new__(cls, node: Node, stride: Sequence[int] | None = None) -> LazyTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, node.shape, strides=stride, dtype=node.dtype, device=torch.device("cpu")
        )
        tensor.node = node
        return tensor

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name == "aten.detach.default":  # by far the most frequent
            return cls(args[0].node, args[0].stride())
        if name == "aten.equal.default" and all(isinstance(arg, LazyTensor) for arg in args):
            return args[0].node is args[1].node or run(func, args, kwargs)
        if func._schema.is_mutable:
            if isinstance(args[0], LazyTensor):
                raise UnsupportedModelError(f"{name} would change a weight of the checkpoint while it is loaded")
            return run(func, args, kwargs)
        shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        if isinstance(shapes, torch.Tensor):
            return cls(_node(name, args, kwargs, None, shapes), shapes.stride())
        if isinstance(shapes, (list, tuple)) and all(isinstance(shape, torch.Tensor) for shape in shapes):
            nodes = (_node(name, args, kwargs, index, shape) for index, shape in enumerate(shapes))
            return type(shapes)(cls(node, shape.stride()) for node, shape in zip(nodes, shapes, strict=True))
        return run(func, args, kwargs)


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """For real: where the answer is not a tensor, or is written to one."""
    result = func(*tree_map(_materialised, args), **tree_map(_materialised, kwargs))
    for arg in args:
        if isinstance(arg, LazyTensor):
            release(arg.node)
    return result


def _node(name: str, args: tuple, kwargs: dict, output: int | None, like: torch.Tensor) -> Node:
    source = args[0]
    same = name in _SAME_VALUES or (name == "aten._to_copy.default" and source.shape == like.shape)
    if isinstance(source, LazyTensor) and source.dtype == like.dtype and same:
        return source.node
    return Operation(tuple(like.shape), like.dtype, name, tree_map(_bare, args), tree_map(_bare, kwargs), output)


def _bare(value: Any) -> Any:
    return value.node if isinstance(value, LazyTensor) else value


def _materialised(value: Any) -> Any:
    return read(value.node, {}) if isinstance(value, LazyTensor) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value
