"""Tokens on their way to the caller's streamer while `generate` runs in the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class EmittingStreamer(BaseStreamer):
    """The worker's end: what `generate` puts is emitted to the caller at once."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit

    def put(self, value: torch.Tensor) -> None:
        self._emit(("put", value))

    def end(self) -> None:
        self._emit(("end", None))


def deliver_to(streamer: BaseStreamer) -> Callable[[Any], None]:
    """The caller's end: hands each event to the streamer that `generate` was given, in the calling thread."""

    def deliver(event: Any) -> None:
        name, value = event
        if name == "put":
            streamer.put(value)
        elif name == "end":
            streamer.end()

    return deliver
