"""Follows weights that the program keeps outside of the model's tables, such as the layers of a plain list.

The ranks have copies of such weights, and torch records no change of them that is made through `.data` or NumPy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.identity import is_written
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.live_code.object_graph import attributes_of
from parallelformers_ng.sharding.attributes import REMOVED


class OutsideWeights:
    """Detects changes of weights inside plain attributes of modules, such as a list of tensors.

    Attributes:
        known: (path of a module, name of an attribute) → value, its tensors, digests of the tensors.
        shared: name → original tensor of a registered weight whose memory other tensors may share.
    """

    def __init__(self, model: nn.Module, attributes: Iterable[tuple[str, str, Any]]) -> None:
        self.shared: dict[str, torch.Tensor] = {}
        self._inside = frozenset(map(id, model.modules()))
        self.known: dict[tuple[str, str], tuple[Any, list[torch.Tensor], list[int]]] = {}
        for path, name, value in attributes:
            self.put(path, name, value)

    def put(self, path: str, name: str, value: Any) -> None:
        tensors = [] if value is REMOVED else [*_weights_in(value, set(self._inside))]
        self.known.pop((path, name), None)
        if tensors:
            self.known[path, name] = value, tensors, [*map(_content, tensors)]

    def changed(self) -> list[tuple[str, str, Any]]:
        """Return path, name and value of each attribute whose weights have changed since they were recorded."""
        for name, original in self.shared.items():
            if is_written(original):
                raise ParallelError(
                    f"{name} was changed after the model was parallelized, through a tensor from before that shares its"
                    " memory, such as one of a state_dict, but the workers have their own copy. Call deparallelize(),"
                    " which keeps the change, then parallelize() again"
                )
        return [
            (*key, value)
            for key, (value, tensors, contents) in [*self.known.items()]  # a copy, because other threads may call `put`
            if [*map(_content, tensors)] != contents
        ]


def _weights_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and type(value) in (torch.Tensor, nn.Parameter):
            yield value
        return
    if isinstance(value, nn.Module):
        inner: Iterable[Any] = vars(value).values()
    elif isinstance(value, dict):
        inner = value.values()
    else:
        inner = value if isinstance(value, (list, tuple, set)) else (attributes_of(value) or {}).values()
    for part in inner:
        yield from _weights_in(part, seen)


def _content(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy())
