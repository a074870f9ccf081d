"""Provides CPU workers that record decode steps like GPU workers, as lists of operators. Only workers import this
module."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

import parallelformers_ng.worker.installing as installing_module
from parallelformers_ng.cuda_graphs.static_caches import ReusableLayer
from parallelformers_ng.kernels import sdpa
from parallelformers_ng.worker.runner import ModelRunner
from tests.helpers.operator_recorder import OperatorRecorder

# The kernels in C are no operators, and a GPU does not run them.
installing_module.installation.install = lambda model, left=(): None
sdpa.install = lambda: None  # type: ignore[assignment]


class RecordedRunner(ModelRunner):
    """A runner that counts recordings and replays, and can be made to fail in several ways."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.operators = OperatorRecorder()
        self.operators.may_replay = False
        self._launching = self.communicator.launching
        self.communicator.launching = self._noted_launching  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _noted_launching(self) -> Iterator[None]:
        with self._launching():
            self.operators.may_replay = True
            yield
            self.operators.may_replay = False

    def recorder(self) -> Any:
        return self.operators

    def counted(self) -> tuple[int, int]:
        """Return the numbers of recordings and replays since the last call."""
        counts = self.operators.recordings, self.operators.replays
        self.operators.recordings = self.operators.replays = 0
        return counts

    def refuse_to_record(self, rank: int) -> None:
        """Make all later recordings fail at their end, on this rank only."""
        self.operators.fails = self.rank == rank

    def lack_room(self, rank: int) -> None:
        """From now on, leave no memory for the caches of recorded steps on this rank only."""
        if not hasattr(ReusableLayer, "has_room"):
            ReusableLayer.has_room = ReusableLayer.lazy_initialization
        ReusableLayer.lazy_initialization = _no_room if self.rank == rank else ReusableLayer.has_room

    def lose_memory(self) -> None:
        """Make the next call allocate its caches at other addresses."""
        caches = self.rank_state.steps["call"]._caches.values()
        self.lost = [layer.whole for kept in caches for layer in kept.layers]
        for kept in caches:
            for layer in kept.layers:
                layer.whole = None

    def put_forward(self, path: str, kind: str) -> None:
        """Make a module compute an operation that no recorded step may contain."""
        module = self.model.get_submodule(path)
        if kind == "hook":
            module.register_forward_hook(lambda module, args, output: None)
            return
        forward, calls = module.forward, itertools.count()

        def spoiled(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if kind == "counts":
                return output.roll(next(calls) % 7, -1)
            return output + 0 * output[output > 0].sum() if kind == "mask" else output + 0 * output.sum().item()

        module.forward = spoiled


def _no_room(layer: Any, *states: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nThe rest is advice.")
