"""Linear layers that read the same tensor, computed as one: q | k | v of attention, gate | up of a feed-forward.

                      x ──► [A₀ | A₁ | A₂] ──► y₀ | y₁ | y₂

A decode step on a device is many small products. One product in the place of three is launched once, and reads its
input once. The weights lie side by side in one tensor, and each layer has a view of it: saving, hooks and new weights
work as before.

Names do not tell these layers. Layers of one module with inputs of one width are laid side by side. They are computed
as one after a pass in which all got the same tensor and the single product gave equal results.
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

MOST_ROWS = 64
"""With more rows a product is bound by arithmetic, and gains nothing."""
_ROWS_COMPARED = 16

_logger = logging.getLogger(__name__)


def lay_side_by_side(model: nn.Module) -> None:
    """Have the layers of a model that may read the same tensor share memory, and be computed as one if they do.

    Their weights are copied, those of one module at a time.
    """
    uses = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    for module in [*model.modules()]:
        for layers in _alike(module, uses):
            SideBySide(layers)


def _alike(module: nn.Module, uses: Counter[int]) -> Iterator[list[nn.Linear]]:
    """Linear layers of a module, two or more at a time, whose weights fit side by side and are nobody else's."""
    groups: dict[Any, list[nn.Linear]] = {}
    for layer in module.children():
        if type(layer) is nn.Linear and all(uses[id(tensor)] == 1 for tensor in layer.parameters()):
            weight = layer.weight
            kind = weight.shape[1], weight.dtype, weight.device, layer.bias is None
            groups.setdefault(kind, []).append(layer)
    return (layers for layers in groups.values() if len(layers) > 1)


class SideBySide:
    """Linear layers whose weights are views of one tensor.

    Args:
        layers: alike in all but the number of their outputs.

    Attributes:
        agree: whether one product gives what the layers give; None until a pass has shown it.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.agree: bool | None = None
        self._layers = layers
        self._weight = self._joined("weight")
        self._bias = None if layers[0].bias is None else self._joined("bias")
        self._held = [
            (layer._parameters, name, tensor) for layer in layers for name, tensor in layer._parameters.items()
        ]
        self._sizes = [len(layer.weight) for layer in layers]
        self._input: Callable[[], Tensor | None] = _nothing
        self._outputs: dict[nn.Linear, Tensor] = {}
        """Of that input, those that nobody has asked for yet; until the layers are known to agree, some rows of those
        that were given."""
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
        """Watch a layer that is computed by itself, until it is known whether the layers agree."""
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
                _logger.info(
                    "%d linear layers are computed one by one: one product gives something else", len(self._sizes)
                )
                self.part()

    def output(self, layer: nn.Linear, input: Tensor) -> Tensor:
        """Return the output of one of the layers that agree."""
        if self._input() is input and layer in self._outputs:
            return self._outputs.pop(layer)
        if self._outputs or any(table.get(name) is not tensor for table, name, tensor in self._held):
            self.part()  # the last input was not for all of them, or a weight was replaced
        if not self.agree or input.numel() > MOST_ROWS * input.shape[-1]:
            return nn.Linear.forward(layer, input)
        self._input = weakref.ref(input)
        self._outputs = dict(zip(self._layers, self._product(input).split(self._sizes, dim=-1), strict=True))
        return self._outputs.pop(layer)

    def part(self) -> None:
        """Have each layer compute what it gives by itself, from now on."""
        self.agree = False
        self._outputs.clear()
        for layer in self._layers:
            layer.__class__ = nn.Linear
            layer.__dict__.pop("side_by_side", None)

    def _product(self, input: Tensor) -> Tensor:
        return functional.linear(input, self._weight, self._bias)


class PartOfProduct(nn.Linear):
    """A linear layer among others."""

    side_by_side: SideBySide

    def forward(self, input: Tensor) -> Tensor:
        if is_compiling():
            return super().forward(input)
        if self.side_by_side.agree:
            return self.side_by_side.output(self, input)
        output = super().forward(input)
        self.side_by_side.note(self, input, output)
        return output


def _nothing() -> None:
    return None
