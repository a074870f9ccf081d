"""Defines moves of a walk about kept state, lost workers and other callers: see tests/helpers/walks.py."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch

from parallelformers_ng import deadline
from parallelformers_ng.errors import DeadlineExpiredError, RequestTimeoutError
from parallelformers_ng.model.parallelized import is_parallelized

Step = Callable[[Any], Any]
EPSILONS = ("variance_epsilon", "eps", "scaling")


def open_and_running() -> tuple[int, int]:
    """Return the number of memory files this process has open, and the number of its descendants."""
    files = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            files += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd")
    return files, len(psutil.Process().children(recursive=True))


def await_as_before(before: tuple[int, int]) -> None:
    """Assert that no additional memory file is open and no additional process runs; wait a short time for processes to
    end."""
    gc.collect()
    end = time.monotonic() + 10
    while open_and_running() != before and time.monotonic() < end:
        time.sleep(0.05)
    now = open_and_running()
    assert now == before, f"memory files open and processes running: {now}, before the walk {before}"


class Moves:
    """Base of the mixins of a walk: the pair of models, and random calls of them.

    Attributes:
        whole, cut: the model, and a parallelized copy of it.
        parallelize: function from a whole model to a parallelized one.
    """

    whole: Any
    cut: Any
    inputs: dict[str, Any]
    _random: random.Random
    parallelize: Callable[[Any], Any]

    def _prompts(self) -> list[torch.Tensor]:
        ids = self.inputs["input_ids"]
        return [ids[:1], ids[-1:], torch.cat([ids[:1], ids[:1, :3]], 1)]

    def _generates(self) -> bool:
        return "input_ids" in self.inputs and self.whole.can_generate()

    def _call(self) -> Step:
        """Return a random call of the model."""
        if self._generates() and self._random.random() < 0.5:
            ids = self._random.choice(self._prompts())
            return lambda model: model.generate(ids, max_new_tokens=3, do_sample=False)
        return lambda model: model(**self.inputs)[0]


class FaultMoves(Moves):
    """A mixin of walks.

    Attributes:
        in_order: whether answers depend on earlier calls.
        timeouts: number of calls that missed a short deadline.
    """

    in_order: bool
    remember: Callable[[], None]
    timeouts = 0

    def fault_moves(self) -> list[Callable[[], tuple[str, Step]]]:
        moves = [self._change_in_a_conversation, self._come_and_go, self._expired, self._rebind]
        return moves if self.in_order else [*moves, self._short, self._crowd]

    def _change_in_a_conversation(self) -> tuple[str, Step]:
        """Set an attribute between two calls with a common beginning."""
        places = [
            (path, name)
            for path, module in self.whole.named_modules()
            for name in EPSILONS
            if isinstance(vars(module).get(name), float)
        ]
        path, name = self._random.choice(places)
        factor, generates = self._random.choice([0.7, 1.5]), self._generates()

        def converse(model: Any) -> list[Any]:
            ids, _, more = self._prompts()
            ids, more = ids.repeat(1, 3), torch.cat([ids.repeat(1, 3), more], 1)
            outputs = []
            for prompt in (ids, more):
                call = model.generate if generates else lambda prompt: model(**self.inputs)[0]
                options = {"max_new_tokens": 3, "do_sample": False} if generates else {}
                outputs.append(call(prompt, **options))
                module = model.get_submodule(path)
                setattr(module, name, vars(module)[name] * factor)
            return outputs

        return f"{path}.{name} *= {factor} between calls", converse

    def _come_and_go(self) -> tuple[str, Step]:
        """Register hooks and remove them, with or without a call in between."""
        calls, call = self._random.random() < 0.5, self._call()

        def take(model: Any) -> list[Any]:
            top = [model, *(child for child in model.children() if any(True for _ in child.parameters()))][:2]
            handles = [module.register_forward_hook(lambda *_: None) for module in top[:1]]
            outputs = [call(model)] if calls else []
            for handle in handles:
                handle.remove()
            return [*outputs, call(model)]

        return "hooks come and go", take

    def _expired(self) -> tuple[str, Step]:
        call = self._call()

        def take(model: Any) -> Any:
            if is_parallelized(model):
                with deadline(1e-4):
                    time.sleep(1e-3)
                    try:
                        call(model)
                        raise AssertionError("an expired call was answered")
                    except DeadlineExpiredError:
                        pass
            return call(model)

        return "an expired deadline", take

    def _short(self) -> tuple[str, Step]:
        call, seconds = self._call(), self._random.choice([0.001, 0.01, 0.1])

        def take(model: Any) -> Any:
            if is_parallelized(model):
                try:
                    with deadline(seconds):
                        call(model)
                except RequestTimeoutError:
                    self.timeouts += 1
            return call(model)

        return f"a deadline of {seconds} s", take

    def _rebind(self) -> tuple[str, Step]:
        """Drop the parallelized model, and parallelize another one instead."""
        call = self._call()

        def take(model: Any) -> Any:
            if not is_parallelized(model):
                return call(model)
            self.cut = self.parallelize(copy.deepcopy(self.whole))
            self.remember()
            return call(self.cut)

        return "rebind", take

    def _crowd(self) -> tuple[str, Step]:
        """Call from several threads at once, and from this thread meanwhile."""
        generates = self._generates()
        rows = self._prompts() if generates else [None] * 3

        def one(model: Any, ids: Any) -> Any:
            return model.generate(ids, max_new_tokens=4, do_sample=False) if generates else model(**self.inputs)[0]

        def take(model: Any) -> list[Any]:
            if not is_parallelized(model):
                return [one(model, ids) for ids in (*rows, rows[0])]
            with ThreadPoolExecutor(len(rows)) as threads:
                together = [threads.submit(one, model, ids) for ids in rows]
                last = one(model, rows[0])
                return [*(each.result() for each in together), last]

        return "calls of several threads", take
