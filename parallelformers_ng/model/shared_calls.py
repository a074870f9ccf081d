"""Calls of `generate` on one model that are decoded together: which may be, and how the ranks are asked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from parallelformers_ng.batching.proof import Trial
from parallelformers_ng.batching.queue import Queue
from parallelformers_ng.batching.rounds import News, Round
from parallelformers_ng.batching.sharing import shared_call, tokens_of
from parallelformers_ng.model.deployment import Deployment
from parallelformers_ng.model.edits import Edits
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.call import Call


class SharedCalls:
    """The calls of one model that share a batch.

    Args:
        deployment: the model's workers.
        edits: what they do not know yet of the model's settings.
        workers: gives the group that is ready, and its incarnation, until a deadline.
        options: the limits.
        prove_at_once: see `Trial`.

    Attributes:
        trial: says whether any call of the model may.
        queue: where they wait.
    """

    def __init__(
        self,
        deployment: Deployment,
        edits: Edits,
        workers: Callable[[float], tuple[WorkerGroup, int]],
        options: BatchingOptions,
        prove_at_once: bool,
    ) -> None:
        self._deployment = deployment
        self._edits = edits
        self._workers = workers
        self.trial = Trial(at_once=prove_at_once)
        self.queue = Queue(options, self.trial)

    def generate(
        self,
        model: Any,
        arguments: dict[str, Any],
        seed: int | None,
        timeout: float | None,
        streamer: Any,
        draw_seed: Callable[[], int] | None,
    ) -> torch.Tensor | str:
        """Have a call share a batch.

        Args:
            arguments: of `generate`, by name.
            seed, timeout, streamer: of this call.
            draw_seed: gives a seed to a call that samples without; None where it would be alone anyway.

        Returns:
            Prompt and tokens, int64 `[1, tokens]`; or why the call has to run alone.

        Raises:
            As `Queue.generate`.
        """
        self.queue.check(*tokens_of(model, arguments))
        call = self.trial.why_alone(type(model), model.config) or shared_call(model, arguments, seed, draw_seed)
        if isinstance(call, str):
            return call
        end = self._deployment.supervisor.current[0].deadline(timeout)
        send = functools.partial(self._decode_rows, model)
        if streamer is None:
            return self.queue.generate(call, send, end)

        def put(tokens: list[int]) -> None:
            for token in tokens:
                streamer.put(torch.tensor([token]))

        streamer.put(call.prompt)
        sequence = self.queue.generate(call, send, end, put)
        streamer.end()
        return sequence

    def _decode_rows(self, model: Any, asked: Round) -> list[News]:
        """Have the ranks run a round, with what they do not know yet of the model's settings."""
        group, incarnation = self._workers(self._deployment.supervisor.current[0].deadline())
        call = Call("", "decode_rows", (), {})
        call.configs, call.attributes, arrived = self._edits.changes(model, incarnation)
        news = group.call_each("decode_rows", [(call, asked)])
        arrived()
        return news
