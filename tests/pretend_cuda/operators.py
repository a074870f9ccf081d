"""Describes the properties of operators on CUDA that are known before an operator runs."""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

_COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
_LOOK_UPS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_ASSERTIONS = {aten._assert_async.default, aten._assert_async.msg}
_TAKE_HOST_SCALARS = {
    *(aten.fill.Tensor, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor),
    *(aten.where.self, aten.where.self_out),
}
_ARITHMETIC = {aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default}
"""Composite operators without copies or waits inside. To treat each as one operator halves the time."""


class Operator:
    """The properties of an operator that are needed at each run.

    Attributes:
        is_composite: whether the operator consists of other operators, which are examined instead.
        is_copy: whether it copies between devices.
        indexes: whether the operator takes indices, which may be on the host.
        looks_up, asserts: whether the device asserts if an index is out of range; whether it always asserts. On the
            host the operator raises.
        takes_numbers: whether it takes host tensors with one number.
        writes_first: whether it writes its first argument.
        writes: places and names of the arguments that it writes.
        waits: whether the host must know the result, or the shape of the result.
        has_device, has_generator: whether the operator has an argument `device`, or `generator`.
        changes_view: whether it changes the shape of its argument in place.
    """

    def __init__(self, func: Any) -> None:
        arguments = func._schema.arguments
        names = {argument.name for argument in arguments}
        first = arguments[0].alias_info if arguments else None
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        self.is_composite = is_composite and func not in _ARITHMETIC
        self.is_copy = func in _COPIES
        self.indexes = func in _INDEXING
        self.looks_up = func in _LOOK_UPS
        self.asserts = func in _ASSERTIONS
        self.takes_numbers = torch.Tag.pointwise in func.tags or func in _TAKE_HOST_SCALARS or self.indexes
        self.writes_first = first is not None and first.is_write
        self.writes = [
            (place, argument.name)
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        waiting = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        self.waits = not self.indexes and bool(waiting & set(func.tags))
        self.has_device = "device" in names
        self.has_generator = "generator" in names
        self.changes_view = torch.Tag.inplace_view in func.tags


@functools.cache
def operator(func: Any) -> Operator:
    """Return the `Operator` of a function."""
    return Operator(func)
