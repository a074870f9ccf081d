"""What a decode step is given: tensors, which a recording reads from buffers, and what must be the same each time."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_DIMENSIONS = {"input_ids": 2, "attention_mask": 4, "position_ids": 2, "token_type_ids": 2}
"""Arguments whose first dimension is that of the rows, where they have so many dimensions."""


class Uncapturable(Exception):
    """Why a step is not recorded, in words."""


class StepArguments:
    """The keyword arguments of one step.

    Args:
        given: `input_ids` `[rows, 1]` among them; tensors may lie in dictionaries.
        cache: the cache among them.

    Attributes:
        tensors: all tensors, in order.
        rows: sequences in the batch.

    Raises:
        Uncapturable: there is an argument that is neither a tensor nor a plain value.
    """

    def __init__(self, given: dict[str, Any], cache: Any) -> None:
        self.given = given
        self.rows = given["input_ids"].shape[0]
        self.tensors: list[Tensor] = []
        self._names: list[str] = []
        self._constants: list[Any] = []
        for name, value in given.items():
            for key, item in value.items() if isinstance(value, dict) else ((None, value),):
                if isinstance(item, Tensor):
                    self.tensors.append(item)
                    self._names.append(name)
                elif item is cache or item is None or isinstance(item, (bool, int, float, str)):
                    item = "cache" if item is cache else item
                else:
                    raise Uncapturable(f"a step is given {name}, a {type(item).__name__}")
                self._constants.append((name, key, None if isinstance(item, Tensor) else item))

    @cached_property
    def can_be_padded(self) -> bool:
        """Whether it is known of every tensor which of its dimensions is that of the rows."""
        return all(
            tensor.ndim == _DIMENSIONS.get(name) and len(tensor) in (1, self.rows)
            for name, tensor in zip(self._names, self.tensors, strict=True)
        )

    def key(self, width: int) -> tuple[Any, ...]:
        """Equal for two steps that one recording of `width` rows can serve."""
        shapes = (self._shape(tensor, width) for tensor in self.tensors)
        kinds = ((tensor.dtype, tensor.device) for tensor in self.tensors)
        return (*self._constants, *shapes, *kinds)

    def buffers(self, width: int) -> list[Tensor]:
        """Tensors of `width` rows for these arguments. What is added to theirs is the first row: valid, whoever reads
        it."""
        buffers = []
        for tensor in self.tensors:
            shape = self._shape(tensor, width)
            filled = tensor if tensor.shape == shape else tensor[:1].expand(shape)
            buffers.append(filled.clone(memory_format=torch.contiguous_format))
        return buffers

    def with_tensors(self, tensors: list[Tensor]) -> dict[str, Any]:
        """The arguments with other tensors in the places of these."""
        rest = iter(tensors)

        def placed(item: Any) -> Any:
            return next(rest) if isinstance(item, Tensor) else item

        return {
            name: {key: placed(item) for key, item in value.items()} if isinstance(value, dict) else placed(value)
            for name, value in self.given.items()
        }

    def _shape(self, tensor: Tensor, width: int) -> tuple[int, ...]:
        padded = self.can_be_padded and len(tensor) == self.rows
        return (width, *tensor.shape[1:]) if padded else tuple(tensor.shape)
