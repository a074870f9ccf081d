"""A weight of a parallelized model as its caller sees it: shape and data type here, values with the workers.

Whatever reads it is answered, for the values are put together when an operation asks for them. Whatever would write to
it, or to a view of it, is refused: the workers would not know. Which operation writes, torch's own schema of it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_any_only

from parallelformers_ng.checkpoint.lazy import LazyTensor, run
from parallelformers_ng.checkpoint.nodes import Leaf, leaves
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import ParallelError


@dataclass(eq=False)
class RemoteWeight(Leaf):
    """A parameter or buffer of a parallelized model.

    Attributes:
        name: its dotted name in the model.
        fetch: puts it together, whole, on CPU.
    """

    name: str
    fetch: Callable[[], torch.Tensor] = field(repr=False)

    def tensor(self) -> torch.Tensor:
        return self.fetch()


class RemoteTensor(LazyTensor):
    """A weight, or a view of one. What is computed from it is an ordinary tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and (written := _written(func, args, kwargs)):
            raise _refusal(f"{func._schema.name.partition('::')[2]}()", written[0])
        if func.is_view:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return run(func, args, kwargs)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return repr(values(self))

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise _refusal("setting .data", next(tensor for tensor in args if isinstance(tensor, RemoteTensor)))
        elif func is torch.Tensor.data_ptr:
            raise _refusal("data_ptr()", args[0], "asks where in memory it lies")
        elif func is torch.Tensor.share_memory_:
            return args[0]  # it lies where several processes read it
        elif func in _BEYOND_OPERATORS:
            return getattr(values(args[0]), func.__name__)(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


_BEYOND_OPERATORS = (
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.is_shared,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.untyped_storage,
)
"""What reads a tensor's memory rather than to run an operator on it."""


def values(tensor: RemoteTensor) -> torch.Tensor:
    """The values, an ordinary tensor; a parameter where `tensor` is one."""
    with torch.no_grad():
        whole = read(tensor.node, {})
        if isinstance(tensor, torch.nn.Parameter):
            whole = torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
    return whole


def _written(func: Any, args: tuple, kwargs: dict) -> list[RemoteTensor]:
    """The remote tensors that an operator would write to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    writes = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    found: list[RemoteTensor] = []
    tree_any_only(RemoteTensor, found.append, [given[name] for name in given if name in writes])  # type: ignore
    return found


def _refusal(what: str, tensor: RemoteTensor, why: str = "would change it") -> ParallelError:
    names = ", ".join(leaf.name for leaf in leaves(tensor.node) if isinstance(leaf, RemoteWeight))
    return ParallelError(
        f"{what} {why}, and {names} lies with the workers of a parallelized model. Call deparallelize() first"
    )
