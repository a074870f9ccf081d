"""Answers requests about the state of the server and its ranks: health, readiness, metrics, plan and page data."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine

_READY_SECONDS = 5.0
_MEMORY_SECONDS = 5.0  # least time between two measurements of memory, because each interrupts the ranks


class Status:
    """Handler of requests about the state of the server."""

    def __init__(self, engine: Engine, chat: Chat) -> None:
        self._engine = engine
        self._chat = chat
        self._memory: asyncio.Future[dict[str, int]] | None = None
        self._measured = -_MEMORY_SECONDS
        self._last_memory: dict[str, int] = {}

    async def health(self) -> Response:
        """Return status 200 while the server process runs."""
        return PlainTextResponse("alive\n")

    async def ready(self) -> Response:
        """Return status 200 if all ranks answer within 5 seconds."""
        if why := await self._engine.ready(_READY_SECONDS):
            raise ApiError(503, f"the ranks are not ready: {why}", code="not_ready")
        return PlainTextResponse("ready\n")

    async def metrics(self) -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(self._engine.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def plan(self) -> dict[str, Any]:
        """Return the bytes of each module of the model, in total and on each rank."""
        return await asyncio.to_thread(summary, self._engine.model)

    async def status(self) -> dict[str, Any]:
        """Return the current figures for the chat page, as a JSON object.

        `memory_bytes` has the bytes that each worker occupies, by device name, measured at most every 5 seconds. After
        a failed measurement, the last figures stay. `tokens_per_second` is the average of the last 10 seconds.
        `running` is the number of answers with at least one token, `waiting` of answers without a token. `rows` is the
        maximum number of sequences that a replica decodes together.
        """
        metrics, options = self._engine.metrics, self._engine.options
        if time.monotonic() > self._measured + _MEMORY_SECONDS and (self._memory is None or self._memory.done()):
            self._measured = time.monotonic()
            self._memory = asyncio.ensure_future(asyncio.to_thread(self._engine.model.memory_reserved))
        if self._memory is not None:
            # Busy ranks may need longer; then the last figures stay.
            done, _ = await asyncio.wait({self._memory}, timeout=0.2)
            if done and self._memory.exception() is None:
                self._last_memory = self._memory.result()
        return {
            "model": options.name,
            "models": list(self._engine.cards),
            "generates": self._engine.generates,
            "chats": self._chat.has_template,
            "needs_key": options.api_key is not None,
            "memory_bytes": self._last_memory,
            "tokens_per_second": metrics.rate,
            "running": metrics.running,
            "waiting": metrics.waiting,
            "rows": options.rows,
        }


def summary(model: Any) -> dict[str, Any]:
    """Return the plan of a model for `/plan`, with one entry for all modules that differ only in the layer number."""
    plan = model.shard_plan
    parts: dict[str, dict[str, Any]] = {}
    for tensor in plan.stored():
        path = [word for word in tensor.name.split(".")[:-1] if word]
        name = ".".join("*" if word.isdigit() else word for word in path) or tensor.name
        part = parts.setdefault(name, {"name": name, "bytes": 0, "ranks": [0] * plan.world_size, "cut": False})
        part["bytes"] += tensor.bytes_whole
        part["cut"] = part["cut"] or not tensor.is_replicated
        for rank in range(plan.world_size):
            part["ranks"][rank] += tensor.bytes_on(rank)
    return {
        "model": plan.model_class,
        "policy": f"{plan.policy} ({plan.source})",
        "bytes_whole": plan.bytes_whole,
        "bytes_per_rank": plan.bytes_per_rank,
        "parts": list(parts.values()),
    }
