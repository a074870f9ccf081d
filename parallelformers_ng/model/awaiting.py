"""Provides `agenerate`: a call of `generate` that an asyncio task awaits, and that runs in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng.runtime.cancellation import Cancellation, cancelled_by

_THREADS = ThreadPoolExecutor(1024, thread_name_prefix="agenerate")  # threads start on demand and are kept


async def agenerate(model: Any, arguments: dict[str, Any]) -> Any:
    """Await `model.generate(**arguments)`, which runs in a thread with a copy of this task's context variables.

    If the task is cancelled, the call on the workers ends within one decode step. A beam search cannot be cancelled,
    and runs to its end on the workers.

    Args:
        model: the parallelized model.
        arguments: arguments of `generate` by name. Except for beam search, the function replaces `streamer` in this
            dictionary.

    Returns:
        Result of `generate`: token ids, int64 `[rows, tokens]`, or a `ModelOutput`, on CPU.

    Raises:
        CancelledError: the task was cancelled; the error is raised at once, also for a beam search.
        ParallelError, BatchingError, StaleCacheError, GroupError: see `Calls.generate`.
        Exception: another error of `generate`, or an error of the streamer.
    """
    cancellation = Cancellation()
    config = arguments.get("generation_config") or model.generation_config
    if (arguments.get("num_beams") or getattr(config, "num_beams", None) or 1) == 1:  # beam search accepts no streamer
        arguments["streamer"] = _Watched(arguments.get("streamer"), cancellation)

    def run() -> Any:
        with cancelled_by(cancellation):
            return model.generate(**arguments)

    context = contextvars.copy_context()
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, context.run, run)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise


class _Watched(BaseStreamer):
    """A streamer that ends the call at the first token after the call was cancelled.

    Args:
        streamer: the caller's streamer, or None.
        cancellation: cancellation of the call.
    """

    def __init__(self, streamer: Any, cancellation: Cancellation) -> None:
        self._streamer = streamer
        self._cancellation = cancellation

    def put(self, value: torch.Tensor) -> None:
        self._cancellation.check()
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()
