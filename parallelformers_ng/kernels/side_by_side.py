"""Computes linear layers that read the same tensor as one: q | k | v of attention, gate | up of a feed-forward.

x ──► [A₀ | A₁ | A₂] ──► y₀ | y₁ | y₂

A decode step on a device consists of many small products. A joint product of three layers needs one launch, and reads
its input once. The weights of a group of layers become one tensor, and each layer has a view of that tensor. Saving,
hooks and replaced weights still work.

Names do not say which layers read the same tensor. So the layers of one module with the same input width become a
group. One product computes the group after a forward pass in which all layers got the same tensor, and in which one
product gave equal results.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

# With more input rows, arithmetic and not memory limits a product, so a joint product saves no time.
MAX_ROWS = 64
_ROWS_COMPARED = 16

log = logging.getLogger("parallelformers_ng")


def lay_side_by_side(model: nn.Module) -> None:
    """Group the linear layers of a model that may read the same tensor, so that one product can compute each group.

    The weights of a group become views of one new tensor. To save memory, weights are copied for one module at a time.
    """
    uses = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    for module in [*model.modules()]:
        for layers in _alike(module, uses):
            SideBySide(layers)


def _alike(module: nn.Module, uses: Counter[int]) -> Iterator[list[nn.Linear]]:
    """Yield groups of a module's linear layers with the same input width, data type and device. Layers with tied
    weights are in no group."""
    groups: dict[Any, list[nn.Linear]] = {}
    for layer in module.children():
        if type(layer) is nn.Linear and all(uses[id(tensor)] == 1 for tensor in layer.parameters()):
            weight = layer.weight
            kind = weight.shape[1], weight.dtype, weight.device, layer.bias is None
            groups.setdefault(kind, []).append(layer)
    return (layers for layers in groups.values() if len(layers) > 1)


class SideBySide:
    """A group of linear layers whose weights are views of one tensor.

    Args:
        layers: linear layers that differ only in the number of outputs; their class becomes `PartOfProduct`.

    Attributes:
        agree: whether one product gave the same outputs as the layers; None before the first test.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.agree: bool | None = None
        self._layers = layers
        self._weight = self._joined("weight")
        self._bias = None if layers[0].bias is None else self._joined("bias")
        self._parameters = [
            (layer._parameters, name, tensor) for layer in layers for name, tensor in layer._parameters.items()
        ]
        self._sizes = [len(layer.weight) for layer in layers]
        self._input: Callable[[], Tensor | None] = lambda: None
        # Outputs of a joint product for `_input` that the layers have not returned yet. Before the test: the last rows
        # of the outputs that the layers have computed one by one.
        self._outputs: dict[nn.Linear, Tensor] = {}
        for layer in layers:
            layer.__class__ = PartOfProduct
            layer.__dict__["side_by_side"] = self

    def _joined(self, name: str) -> Tensor:
        parts = [layer._parameters[name].detach() for layer in self._layers]  # type: ignore[union-attr]
        whole = torch.cat(parts)
        for layer, part in zip(self._layers, whole.split([len(part) for part in parts]), strict=True):
            layer._parameters[name] = nn.Parameter(part, requires_grad=False)
        return whole

    def note(self, layer: nn.Linear, input: Tensor, output: Tensor) -> None:
        """Record the output of a layer for the test of a joint product. After the last layer of the group, run the
        test.

        The test compares the last 16 rows. The largest difference may be 1e-4 of the largest output in float32 and
        float64, 2e-2 in other types. If the outputs differ, or if not all layers get the same tensor, the group is
        dissolved.
        """
        if self._input() is not input or layer in self._outputs:
            if self._outputs:
                return self.part()
            self._input = weakref.ref(input)
        self._outputs[layer] = output.reshape(-1, output.shape[-1])[-_ROWS_COMPARED:].clone()
        if len(self._outputs) == len(self._layers):
            want = torch.cat([self._outputs.pop(layer) for layer in self._layers], dim=-1)
            product = self._product(input.reshape(-1, input.shape[-1])[-_ROWS_COMPARED:])
            tolerance = (1e-4 if want.dtype in (torch.float32, torch.float64) else 2e-2) * want.abs().max()
            self.agree = bool((product - want).abs().max() <= tolerance)
            if not self.agree:
                log.info(
                    "%d linear layers are computed one by one: one product gives different results", len(self._sizes)
                )
                self.part()

    def output(self, layer: nn.Linear, input: Tensor) -> Tensor:
        """Return the output of a layer whose group has passed the test.

        The first call with a new input computes the outputs of all layers, for at most `MAX_ROWS` rows. The other
        layers' calls with the same input return the outputs that this call computed.
        """
        if self._input() is input and layer in self._outputs:
            return self._outputs.pop(layer)
        if self._outputs or any(table.get(name) is not tensor for table, name, tensor in self._parameters):
            self.part()  # a layer did not read the last input, or a weight was replaced
        if not self.agree or input.numel() > MAX_ROWS * input.shape[-1]:
            return nn.Linear.forward(layer, input)
        self._input = weakref.ref(input)
        self._outputs = dict(zip(self._layers, self._product(input).split(self._sizes, dim=-1), strict=True))
        return self._outputs.pop(layer)

    def part(self) -> None:
        """Dissolve the group: from now on, each layer computes its own output."""
        self.agree = False
        self._outputs.clear()
        for layer in self._layers:
            layer.__class__ = nn.Linear
            layer.__dict__.pop("side_by_side", None)

    def _product(self, input: Tensor) -> Tensor:
        return functional.linear(input, self._weight, self._bias)


class PartOfProduct(nn.Linear):
    """A linear layer of a `SideBySide` group. One product may compute all layers of the group."""

    side_by_side: SideBySide

    def forward(self, input: Tensor) -> Tensor:
        if is_compiling():
            return super().forward(input)
        if self.side_by_side.agree:
            return self.side_by_side.output(self, input)
        output = super().forward(input)
        self.side_by_side.note(self, input, output)
        return output
