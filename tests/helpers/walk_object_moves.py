"""Defines moves of a walk about the objects of the program: arguments, kept answers, stop flags, values and lazy
methods; see tests/helpers/walks.py."""

from __future__ import annotations

import asyncio
import io
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import is_parallelized
from tests.helpers import walk_settings as settings
from tests.helpers.walk_moves import Moves, Step

LONG = 45
"""Tokens of a call that a flag stops earlier."""


class Flagged(StoppingCriteria):
    """Stops after a number of tokens, or when a flag is set; a call with a flag is slow."""

    of_class = False

    def __init__(self, is_set: Callable[[Any], bool], limit: int | None) -> None:
        self.is_set, self.limit = is_set, limit
        self.stop, self.table, self.seen = False, {"stop": False}, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += 1
        if self.limit is None:
            time.sleep(0.03)
            return torch.full((len(input_ids),), bool(self.is_set(self)))
        return torch.full((len(input_ids),), self.seen >= self.limit)


class Changing(LogitsProcessor):
    """Changes state of many kinds at each token, and draws from three generators."""

    of_class = 0

    def __init__(self) -> None:
        self.seen, self.table, self.total, self.random = list[int](), {"n": 0}, torch.zeros(2), random.Random(3)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.shape[1])
        self.table["n"] += 1
        self.total.add_(0.5)
        type(self).of_class += 1
        noise = torch.from_numpy(np.random.rand(scores.shape[-1])).float()
        return scores + noise * (self.random.random() + random.random())

    def state(self) -> list[Any]:
        return [self.seen, self.table, self.total, self.of_class, self.random.random()]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


async def collected(answers: Any) -> list[Any]:
    return [each async for each in answers]


def within(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with model.negated():
        return model(ids).logits


LAZY: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "generator": lambda model, ids: [*model.stream(ids)],
    "part of a generator": lambda model, ids: next(model.stream(ids)),
    "coroutine": lambda model, ids: asyncio.run(model.answer(ids)),
    "generator of coroutines": lambda model, ids: asyncio.run(collected(model.answers(ids))),
    "context manager": within,
}


class ObjectMoves(Moves):
    """A mixin of walks."""

    _length = 0

    def object_moves(self) -> list[Callable[[], tuple[str, Step]]]:
        return [self._keep, self._keep, self._stop, self._objects, self._lazy, self._value]

    def check_kept(self) -> None:
        """Compare the kept tensors with their copies."""
        for tensor, copied in self._kept:
            assert torch.equal(tensor, copied), "a kept answer has changed"

    def _keep(self) -> tuple[str, Step]:
        """Keep one tensor of a large answer, and write to it."""
        number, writes = self._random.randrange(9), self._random.random() < 0.5

        def take(model: Any) -> torch.Tensor:
            output = model(**self.inputs, output_hidden_states=True, return_dict=True)
            output.pop("past_key_values", None)
            tensors = [each.detach() for each in tensors_in(output)]
            tensor, copies = tensors[number % len(tensors)], [each.clone() for each in tensors]
            if writes and is_parallelized(model):
                tensor.mul_(2)
                copies[number % len(tensors)].mul_(2)
                assert sum(not torch.equal(a, b) for a, b in zip(tensors, copies, strict=True)) == 0
            if is_parallelized(model):
                file = io.BytesIO()
                torch.save(tensor, file)
                assert file.tell() < tensor.nbytes + 3000
                self._kept.append((tensor, tensor.clone()))
                return tensor / 2 if writes else tensor
            return tensor

        return f"keep tensor {number}{', written' if writes else ''}", take

    def _stop(self) -> tuple[str, Step]:
        """Stop a call by a flag that another thread sets; the plain model stops after the same number of tokens."""
        if not self._generates():
            return self._keep()
        closed = False

        def close(value: bool) -> None:
            nonlocal closed
            closed = value

        flags: dict[str, tuple[Callable[[Any], bool], Callable[[Any, bool], Any]]] = {
            "attribute": (lambda c: c.stop, lambda c, value: setattr(c, "stop", value)),
            "dictionary": (lambda c: c.table["stop"], lambda c, value: c.table.update(stop=value)),
            "class": (lambda c: c.of_class, lambda c, value: setattr(Flagged, "of_class", value)),
            "closure": (lambda c: closed, lambda c, value: close(value)),
            "module": (lambda c: settings.stop, lambda c, value: setattr(settings, "stop", value)),
        }
        kind = self._random.choice(list(flags))
        is_set, write = flags[kind]
        ids, seconds = self._random.choice(self._prompts()), self._random.uniform(0, 0.3)

        def take(model: Any) -> list[Any]:
            is_cut = is_parallelized(model)
            if is_cut:
                self._length = LONG  # if the call raises, the plain model raises, too
            criterion = Flagged(is_set, None if is_cut else self._length)
            timer = threading.Timer(seconds if is_cut else 0, write, [criterion, True])
            timer.start()
            try:
                options = {"max_new_tokens": LONG, "min_new_tokens": LONG, "do_sample": False}
                tokens = model.generate(ids, stopping_criteria=[criterion], **options)
            finally:
                timer.join()
                write(criterion, False)
            if is_cut:
                assert criterion.seen < LONG, "the flag did not stop the call"
                self._length = criterion.seen
            return [tokens, criterion.seen]

        return f"stop by {kind} after {seconds:.2f} s", take

    def _objects(self) -> tuple[str, Step]:
        if not self._generates():
            return self._keep()
        ids, times = self._random.choice(self._prompts()), self._random.randint(1, 2)

        def take(model: Any) -> list[Any]:
            Changing.of_class = 0
            processor, results = Changing(), list[Any]()
            before = (processor.seen, processor.table, processor.total, processor.random)
            for _ in range(times):
                results.append(model.generate(ids, logits_processor=[processor], max_new_tokens=4, do_sample=False))
                results.append(processor.state())
            after = (processor.seen, processor.table, processor.total, processor.random)
            assert all(one is other for one, other in zip(before, after, strict=True))
            return results

        return f"objects changed by {times} calls", take

    def _lazy(self) -> tuple[str, Step]:
        if not hasattr(self.whole, "stream"):
            return self._keep()
        kind, ids = self._random.choice(list(LAZY)), self._random.choice(self._prompts())
        return f"lazy {kind}", lambda model: LAZY[kind](model, ids)

    def _value(self) -> tuple[str, Step]:
        """Set a value in a module of the program, for both models at once."""
        call, value = self._call(), self._random.choice([0.5, 0.75, 1.0, 1.25])
        writes: dict[str, Callable[[float], Any]] = {
            "number": lambda value: setattr(settings, "SCALE", value),
            "table": lambda value: settings.TABLE.update(scale=value),
            "new table": lambda value: setattr(settings, "TABLE", {"scale": value}),
            "attribute": lambda value: setattr(settings.OPTIONS, "noise", value),
            "class attribute": lambda value: setattr(settings.Options, "noise", value),
        }
        kind = self._random.choice(list(writes))

        def take(model: Any) -> Any:
            writes[kind](value)
            try:
                return call(model)
            except ParallelError:
                writes[kind](1.0)
                raise

        return f"{kind} of a module = {value}", take

    _kept: list[tuple[torch.Tensor, torch.Tensor]]
