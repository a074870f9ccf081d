"""Streams tokens to the caller's streamer while `generate` runs on the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class EmittingStreamer(BaseStreamer):
    """A streamer on the worker that sends the tokens of each `put` to the caller at once, and None at the end.

    Args:
        emit: function that sends a value to the caller.
    """

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit

    def put(self, value: torch.Tensor) -> None:
        self._emit(value)

    def end(self) -> None:
        self._emit(None)


def deliver(streamer: BaseStreamer, event: torch.Tensor | None) -> None:
    """Pass an event of an `EmittingStreamer` to the caller's streamer in the calling thread.

    Args:
        streamer: streamer of the caller, which may raise any exception.
        event: token ids, int64: `[rows, tokens]` for the prompt, `[rows]` for a step, `[1, tokens]` for a step of
            assisted decoding. None at the end.
    """
    if event is None:
        streamer.end()
    else:
        streamer.put(event)
