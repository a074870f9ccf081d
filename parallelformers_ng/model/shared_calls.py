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
from parallelformers_ng.model.adapters import Adapters
from parallelformers_ng.model.replica import Dispatcher
from parallelformers_ng.model.row_steps import RowSteps
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.worker.call import Call


class SharedCalls:
    """The calls of one model that share a batch.

    Args:
        options: the limits.
        trial: says whether any call of the model may.
        dispatcher: dispatcher of the replica whose workers decode them.
        adapters: the model's, None where it has none.
        steps: whether their steps become CUDA graphs.

    Attributes:
        queue: queue in which they wait.
    """

    def __init__(
        self,
        options: BatchingOptions,
        trial: Trial,
        dispatcher: Dispatcher,
        adapters: Adapters | None,
        steps: RowSteps,
    ) -> None:
        self.trial = trial
        self.queue = Queue(options, trial)
        self._replica, self._edits = dispatcher.replica, dispatcher.edits
        self._adapters = adapters
        self._steps = steps

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
            arguments: arguments of `generate`, by name.
            seed, timeout, streamer: options of this call.
            draw_seed: gives a seed to a call that samples without; None where it would be alone anyway.

        Returns:
            Prompt and tokens, int64 `[1, tokens]`; or why the call has to run alone.

        Raises:
            As `Queue.generate`.
        """
        self.queue.check(*tokens_of(model, arguments))
        call: Any = self.trial.why_alone(type(model), model.config, self._edits.code_count())
        call = call or shared_call(model, arguments, seed, draw_seed)
        if isinstance(call, str):
            return call
        call.adapters = None if self._adapters is None else self._adapters.active()
        end = self._replica.deadline_of(timeout)
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
        """Have the ranks run a round, with what they do not know yet of the model's settings.

        Raises:
            torch.OutOfMemoryError: on a device; if steps were recorded, the next round does without, and has more room.
        """
        group, incarnation = self._replica.ready()
        call = Call("", "decode_rows", (), {}, adapters=asked.adapters)
        arrived = self._edits.put_into(call, model, incarnation)
        asked.positions = self._steps.positions(model)
        why = ""
        try:
            news = group.call_each("decode_rows", [(call, asked)], to_devices=True)
            arrived()
            why = news[0].uncaptured
        except torch.OutOfMemoryError as error:
            why = str(error).partition("\n")[0]
            raise
        finally:
            if why and asked.positions:
                self._steps.give_up(why)
                group.call("forget_steps")
        return news
