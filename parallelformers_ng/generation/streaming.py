"""Streams tokens to the caller's streamer while `generate` runs on the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class EmittingStreamer(BaseStreamer):
    """A streamer on the worker that sends the tokens of each `put` to the caller at once, and None at the end."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit

    def put(self, value: torch.Tensor) -> None:
        self._emit(value)

    def end(self) -> None:
        self._emit(None)


def deliver(streamer: BaseStreamer, event: torch.Tensor | None) -> None:
    if event is None:
        streamer.end()
    else:
        streamer.put(event)
