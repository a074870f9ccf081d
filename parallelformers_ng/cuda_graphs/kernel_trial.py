"""Decides, once for each model, whether Triton kernels or the model's modules compute the recorded decode steps.

The first step that may be recorded runs both by the kernels and by the modules, from the same cache. The kernels
compute all later steps if

- on every rank each layer's output, and the keys and values that it wrote to the cache, agree with the modules';
- a CUDA graph of the step with the kernels is not slower than one with the modules, on the clock of rank 0's device.

Otherwise the modules compute, and the log says why, in one line. The first step runs once more in the chosen way, so
that the same call gives the same tokens at a second time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.shared_result import agreed
from parallelformers_ng.cuda_graphs.masks import masks_converted_once
from parallelformers_ng.cuda_graphs.recorder import CaptureCheck, CudaRecorder

# How a step runs. modules: by the modules. watched: by the modules, with a check whether the kernels support the step.
# both: by kernels and modules, which are compared layer by layer. kernels: by the kernels.
KernelMode: TypeAlias = Literal["modules", "watched", "both", "kernels"]
# A CUDA graph is timed in this number of replays, and the fastest replay counts.
REPLAYS = 5
log = logging.getLogger("parallelformers_ng")


class KernelTrial:
    """Decides once whether kernels or modules compute one model's decode steps.

    Args:
        kernels: `kernels.step_kernels.StepKernels`; not imported, because its package imports this one.

    Attributes:
        mode: result of the trial, "modules" or "kernels", equal on all ranks; None before the trial.
    """

    def __init__(self, kernels: Any, recorder: CudaRecorder, communicator: Communicator) -> None:
        self.mode: KernelMode | None = None
        self._kernels = kernels
        self._recorder = recorder
        self._communicator = communicator

    def computing(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._kernels.computing(self.mode or "modules")
        return context

    def decide(
        self, step: Callable[[], Any], snapshot: Callable[[], Sequence[tuple[Tensor, Tensor]]], counts: Sequence[Tensor]
    ) -> None:
        """Compare kernels and modules on one decode step, set `mode`, and restore the tensors of the cache.

        All ranks must call this method at the same step, because they exchange their results. After an error, the
        modules compute the steps; but errors of collectives between the ranks are raised.

        Args:
            step: function that runs the step over the cache. The tensors of the step must stay at the same addresses
                until this method returns.
            snapshot: function that returns (tensor, copy of the tensor) for every tensor of the cache.
            counts: tensors of the cache, at least one, with the position that a step writes to, int64 without
                dimensions.
        """
        agree = functools.partial(agreed, self._communicator, counts[0].device)
        reason = agree(self._kernels.obstacle)
        if not reason:
            saved = snapshot()
            slower = functools.partial(self._slower, saved, counts)
            # `_unserved` is first, so that all ranks run `_differ` or none: it runs more collectives than a step.
            for check in (self._unserved, self._differ, slower):
                reason = reason or agree(functools.partial(check, step), of_first=check is slower)
                _restore(saved)
        self.mode = "modules" if reason else "kernels"
        if self._communicator.rank == 0:
            result = f"are left to their operators: {reason}" if reason else "are computed by the Triton kernels"
            log.log(logging.WARNING if reason else logging.INFO, "decode steps %s", result)

    def _unserved(self, step: Callable[[], Any]) -> str:
        with CaptureCheck() as check, self._kernels.computing("watched"):
            self._recorder.warm_up(step)
        return check.found or ("" if self._kernels.are_served() else "a layer is not one that they compute")

    def _differ(self, step: Callable[[], Any]) -> str:
        with self._kernels.computing("both"):
            self._recorder.warm_up(step)
        return str(self._kernels.difference())

    def _slower(self, saved: Sequence[tuple[Tensor, Tensor]], counts: Sequence[Tensor], step: Callable[[], Any]) -> str:
        starts = [copy for tensor, copy in saved if any(tensor is count for count in counts)]
        with self._kernels.computing("kernels"):
            self._recorder.warm_up(step)
            _restore(saved)
            ours = self._milliseconds(step, counts, starts)
        theirs = self._milliseconds(step, counts, starts)
        return "" if ours <= theirs else f"a step takes {ours:.2f} ms with the kernels, and {theirs:.2f} ms without"

    def _milliseconds(self, step: Callable[[], Any], counts: Sequence[Tensor], starts: Sequence[Tensor]) -> float:
        with masks_converted_once():
            output, graph = self._recorder.record(step)
        try:
            times = []
            for _ in range(REPLAYS):
                for count, start in zip(counts, starts, strict=True):
                    count.copy_(start)
                with self._communicator.launching():
                    times.append(self._recorder.milliseconds(graph))
            return min(times)
        finally:
            del output
            self._recorder.destroy(graph)


def _restore(saved: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, copy in saved:
        tensor.copy_(copy)
