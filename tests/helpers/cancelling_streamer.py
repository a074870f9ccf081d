"""A streamer that ends its call. A file of its own, because ranks import the faults that use it."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer


class Cancels(BaseStreamer):
    """A streamer that cancels its call after some tokens, in the caller."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens + 1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self._left -= 1
        if self._left < 0:
            raise InterruptedError("enough of it")

    def end(self) -> None:
        pass
