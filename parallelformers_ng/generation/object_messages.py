"""Defines the messages with which caller and ranks keep their copies of a call's objects equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.generation.object_parts import Place
from parallelformers_ng.wire.frame import Handle

# Event with which rank 0 tells the caller that the ranks have applied the latest `ObjectState.update`.
TAKEN = Handle("taken")


@dataclass
class Changes:
    """Message with changes of mutable objects: a pickle, and the tensors to which the pickle refers by index."""

    data: bytes
    tensors: list[torch.Tensor]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields. Messages sign objects that have this method; `data` needs a signature: it is code."""
        vars(self).update(state)


@dataclass
class Given:
    """Message from which the ranks learn which mutable objects of a call the caller has found.

    Attributes:
        imported: classes and functions that a rank must import before it unpickles functions of the same modules.
        shape: checksum of the class names of all mutable objects, in order.
        places: classes, functions and modules that a rank may import; each with the caller's values of its attributes,
            by name, and of its closure variables, by index.
        is_live: whether the caller sends what other threads change during the call.
    """

    imported: list[Any]
    shape: int
    is_live: bool = False
    places: list[tuple[Place, dict[str, Any], dict[int, Any]]] = field(default_factory=list)
