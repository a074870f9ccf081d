"""Records one decode step as a CUDA graph, replays the graph, and tests it.

A graph may freeze more than shapes, for example a position that Python code counts, and then gives wrong logits at
another position. So the first two steps of a graph run twice from the same state: from the graph and normally. The
logits must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.masks import masks_converted_once
from parallelformers_ng.cuda_graphs.recorder import CudaRecorder, KeptAlive, StepArguments
from parallelformers_ng.cuda_graphs.static_caches import ReusableCache
from parallelformers_ng.sharding.cache_names import CACHE

Forward = Callable[..., Any]

# The first steps of a CUDA graph run also without the graph, and the logits of both runs are compared.
PROOFS = 2


class CapturedStep:
    """The CUDA graph of a decode step of `width` rows, and the buffers of its arguments.

    Attributes:
        proofs_left: number of steps that `prove` must still run.
    """

    def __init__(
        self,
        run: Forward,
        arguments: StepArguments,
        reusable: ReusableCache,
        width: int,
        recorder: CudaRecorder,
        communicator: Communicator,
    ) -> None:
        self.proofs_left = PROOFS
        self._cache = reusable
        self._communicator = communicator
        self._recorder = recorder
        self._buffers = arguments.buffers(width)
        self._feed(arguments)
        buffered, self._kept = arguments.with_tensors(self._buffers), KeptAlive()

        def step() -> Any:
            with self._kept:
                return run(**buffered)

        with reusable.widened(width), masks_converted_once():
            output, self._graph = recorder.record(step)
        self._kind = type(output)
        self._logits = output.logits
        self._names = tuple(output.keys())

    def destroy(self) -> None:
        """Destroy the CUDA graph and free its memory, even if other objects still refer to this object."""
        self._recorder.destroy(self._graph)
        del self._graph, self._logits, self._kept, self._buffers

    def run(self, arguments: StepArguments) -> Any:
        """Replay the CUDA graph for arguments with the recorded shapes, but possibly fewer rows."""
        logits = self._compute(arguments)
        self._cache.advance()
        values = {"logits": logits, CACHE: self._cache.cache}
        return self._kind(**{name: values[name] for name in self._names})

    def prove(self, run: Forward, arguments: StepArguments) -> tuple[Any, str]:
        """Run a step both by the CUDA graph and normally, and compare the logits.

        The logits agree if the largest difference is at most 1e-4 of the largest logit in float32 and float64, 2e-2 in
        other types. Afterwards the cache has the tokens of the normal run. Returns the normal run's output, and a
        description of a difference, or "".
        """
        before = self._cache.snapshot()
        result = self._compute(arguments)
        for tensor, saved in before:
            tensor.copy_(saved)
        output = run(**arguments.given)
        want = output.logits
        tolerance = (1e-4 if want.dtype in (torch.float32, torch.float64) else 2e-2) * want.abs().max()
        self.proofs_left -= 1
        agree = bool((result - want).abs().max() <= tolerance)
        return output, "" if agree else "a recorded step gives other logits than the step as it is"

    def _compute(self, arguments: StepArguments) -> Tensor:
        self._feed(arguments)
        with self._communicator.launching():
            self._graph.replay()
        return self._logits[: arguments.rows].clone()  # a copy, because the next replay overwrites the logits

    def _feed(self, arguments: StepArguments) -> None:
        """Copy the arguments into the graph's buffers. Unused rows keep their initial values, which are valid."""
        for buffer, tensor in zip(self._buffers, arguments.tensors, strict=True):
            (buffer if buffer.shape == tensor.shape else buffer[: len(tensor)]).copy_(tensor)
