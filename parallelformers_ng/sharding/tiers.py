"""Defines where weights that do not fit on the devices are kept. Pure data, made by `offload/assignment.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "cpu", "disk"]


@dataclass(frozen=True)
class Tiers:
    """Where each rank keeps each layer's weights. Embeddings, head and buffers are always on the devices."""

    # path of each layer that may be in RAM or on disk → names of its stored tensors, in the model's order
    layers: dict[str, list[str]]
    places: list[dict[str, Place]]  # for each rank, path of a layer → where the rank keeps its shards of the layer
    is_cuda: bool  # whether the ranks compute on CUDA devices; if so, weights in RAM are copied to the devices
    # folder for files of weights on disk; None if the caller gave no folder, and no weights are on disk
    folder: str | None

    def place(self, name: str, rank: int) -> Place:
        path = self._layer_of.get(name)
        return "device" if path is None else self.places[rank].get(path, "device")

    def moved(self, rank: int) -> Iterator[tuple[str, list[str]]]:
        """Yield the path and the stored names of each layer that a rank loads before the layer runs."""
        for path, place in self.places[rank].items():
            if place == "disk" or (place == "cpu" and self.is_cuda):
                yield path, self.layers[path]

    @functools.cached_property
    def _layer_of(self) -> dict[str, str]:
        return {name: path for path, names in self.layers.items() for name in names}
