"""A module of the program whose functions and classes are given to calls: the ranks import the module."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import LogitsProcessor

notes: list[int] = []
ALLOWED = [*range(5, 60)]
count = 0
stop = False
event = threading.Event()
lock = threading.Lock()


def noting(batch: int, ids: torch.Tensor, defaults: list[int] = []) -> list[int]:  # noqa: B006
    global count
    with lock:
        count += 1
    notes.append(len(ids))
    defaults.append(count)
    noting.calls = len(defaults)
    return ALLOWED


class Noting(LogitsProcessor):
    made: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.note(len(notes))
        return scores

    def note(self, value: int) -> None:
        self.made.append(value)


def reset() -> None:
    global count
    count = 0
    notes.clear()
    Noting.made.clear()
    noting.__defaults__[0].clear()


def state() -> Any:
    return count, [*notes], [*Noting.made], [*noting.__defaults__[0]], noting.calls
