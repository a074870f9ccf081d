"""Tensors without values in this process: the values are in checkpoint files (`LazyTensor`) or on the workers
(`RemoteTensor`).

A `LazyTensor` records each operation as a `Node`, and reads no values. transformers' own loading code runs on lazy
tensors in the parent: the code renames, stacks, splits, casts and ties tensors, and reports missing keys. The result is
a node for every parameter, and each worker reads its slice of that node. So the conversions of every model family work
without code for that family.

A `RemoteTensor` is a weight of a parallelized model in the caller's process. An operation that reads the weight gathers
its values from the workers. An operation that writes to the weight, or to a view of it, raises an error, because the
workers would not see the change. torch's schema of an operation says which arguments the operation writes to.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from parallelformers_ng.checkpoint.encoded import Decoded, stored_encoding
from parallelformers_ng.checkpoint.nodes import FetchedLeaf, Node, Operation, leaves, parts, release
from parallelformers_ng.checkpoint.read_only import ReadOnlyTensor, written
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import ParallelError, UnsupportedModelError
from parallelformers_ng.sharding.encoding import Encoding

_SAME_VALUES = ("aten.alias.default", "aten.detach.default", "aten.clone.default")


class LazyTensor(torch.Tensor):
    """A CPU tensor without memory: its `node` is an expression that computes its values from stored tensors.

    A torch operation on lazy tensors returns lazy tensors and reads no values. `torch.equal` of two lazy tensors, and
    in-place operations that write to an ordinary tensor, such as `copy_`, read the values. Other uses of values, such
    as `item`, raise RuntimeError. In-place operations on a lazy tensor raise UnsupportedModelError.
    """

    node: Node

    @staticmethod
    def __new__(cls, node: Node, stride: Sequence[int] | None = None) -> LazyTensor:
        cpu = torch.device("cpu")
        tensor = torch.Tensor._make_wrapper_subclass(cls, node.shape, strides=stride, dtype=node.dtype, device=cpu)
        tensor.node = node
        return tensor

    @property
    def encoding(self) -> Encoding | None:
        """Quantization format in which the checkpoint stores this tensor; None if it is not quantized."""
        stored = stored_encoding(self.node)
        return None if stored is None else stored.encoding

    @property
    def is_quantized_within(self) -> bool:
        return any(isinstance(part, Decoded) for part in parts(self.node))

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = str(func)
        if name == "aten.detach.default":  # a shortcut, because loading calls `detach` most often by far
            return cls(args[0].node, args[0].stride())
        if name == "aten.equal.default" and all(isinstance(arg, LazyTensor) for arg in args):
            return args[0].node is args[1].node or _run(func, args, kwargs)
        if func._schema.is_mutable:
            if isinstance(args[0], LazyTensor):
                raise UnsupportedModelError(f"{name} would change a weight of the checkpoint during loading")
            return _run(func, args, kwargs)
        shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        if isinstance(shapes, torch.Tensor):
            return cls(_node(name, args, kwargs, None, shapes), shapes.stride())
        if isinstance(shapes, (list, tuple)) and all(isinstance(shape, torch.Tensor) for shape in shapes):
            nodes = (_node(name, args, kwargs, index, shape) for index, shape in enumerate(shapes))
            return type(shapes)(cls(node, shape.stride()) for node, shape in zip(nodes, shapes, strict=True))
        return _run(func, args, kwargs)


def applied(node: Node, function: Callable[[Any], Any]) -> Node:
    return function(LazyTensor(node)).node


def turned(node: Node) -> Node:
    return applied(node, lambda tensor: tensor.transpose(-2, -1))


class RemoteTensor(LazyTensor):
    """A weight whose values are on the workers, or a view of such a weight.

    View operations return a `RemoteTensor`. All other operations return ordinary tensors.

    Each operation that needs values fetches them from the workers again. In-place operations on the weight, and
    `data_ptr`, raise ParallelError.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        for tensor in written(func, args, kwargs) if func._schema.is_mutable else ():
            if isinstance(tensor, RemoteTensor):
                raise _refusal(f"{func._schema.name.partition('::')[2]}()", tensor)
        if func.is_view:
            with torch.inference_mode(False):  # a view needs a version counter, which inference tensors do not have
                return super().__torch_dispatch__(func, types, args, kwargs)
        return _run(func, args, kwargs)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return repr(values(self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise _refusal("setting .data", next(tensor for tensor in args if isinstance(tensor, RemoteTensor)))
        elif func is torch.autograd.grad:
            tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, RemoteTensor)]
            raise _refusal("grad()", tensors[0], "asks for a gradient")
        elif func is torch.Tensor.data_ptr:
            raise _refusal("data_ptr()", args[0], "needs its address in this process")
        elif func is torch.Tensor.share_memory_:
            return args[0]  # nothing to do: the values are already in memory that several processes can read
        elif func in _BEYOND_OPERATORS:
            whole = values(args[0])
            # `copy.deepcopy` keeps `whole` alive, so that no other tensor gets its id, which is a key of the memo.
            if func is torch.Tensor.__deepcopy__:
                return copy.deepcopy(whole, *args[1:])
            whole = whole.as_subclass(ReadOnlyTensor) if func in _SHARING else whole
            return getattr(whole, func.__name__)(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


# Methods whose results share the memory of a tensor, so a `RemoteTensor` gives them read-only values.
_SHARING = (torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.numpy)
# Methods that read the memory of a tensor without a torch operator, so `__torch_dispatch__` does not see them.
_BEYOND_OPERATORS = (
    *_SHARING,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.is_shared,
    torch.Tensor.tolist,
    torch.Tensor.untyped_storage,
)


def values(tensor: RemoteTensor) -> torch.Tensor:
    """Fetch the values of a remote tensor from the workers: an ordinary CPU tensor, or a parameter for a parameter."""
    with torch.no_grad():
        whole = read(tensor.node, {})
        if isinstance(tensor, torch.nn.Parameter):
            whole = torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
    return whole


def _refusal(what: str, tensor: RemoteTensor, why: str = "would change it") -> ParallelError:
    names = ", ".join(leaf.name for leaf in leaves(tensor.node) if isinstance(leaf, FetchedLeaf))
    return ParallelError(f"{what} {why}; {names} is on the workers of a parallelized model. Call deparallelize() first")


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on the values of its lazy arguments, and unmap the pages that were read."""
    whole_args, whole_kwargs = tree_map_only(LazyTensor, lambda tensor: read(tensor.node, {}), (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    for arg in args:
        if isinstance(arg, LazyTensor):
            release(arg.node)
    return result


def _node(name: str, args: tuple, kwargs: dict, output: int | None, like: torch.Tensor) -> Node:
    """Return the expression for an operation's result; the operand's own expression if the values do not change."""
    source = args[0]
    same = name in _SAME_VALUES or (name == "aten._to_copy.default" and source.shape == like.shape)
    if isinstance(source, LazyTensor) and source.dtype == like.dtype and same:
        return source.node
    args, kwargs = tree_map_only(LazyTensor, operator.attrgetter("node"), (args, kwargs))
    return Operation(tuple(like.shape), like.dtype, name, args, kwargs, output)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value
