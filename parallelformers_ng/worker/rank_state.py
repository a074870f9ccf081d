"""Holds and deletes the data that a rank keeps from one call for later calls.

| kept data | where | parts of the model on which the data depend |
| --- | --- | --- |
| recordings and their caches | `cuda_graphs.captured.CapturedSteps` | attributes, configurations, adapters, hooks |
| KV cache of earlier sequences | `batching.prefix_cache.PrefixCache` | attributes, configurations, adapters, hooks |
| choice of kernels or modules | `cuda_graphs.kernel_trial.KernelTrial` | attributes, configurations, adapters, hooks |
| modules that kernels replace | `kernels.installation.forget` | attributes, configurations, adapters, hooks |
| configuration, mask and angles of the latest step | `kernels.layer_halves.Step` | attributes, hooks |
| bounds of ids that were looked up on a device | `sharding.look_ups` | none; deleted with the model |

Weights do not change while a model is parallelized. The rows of a batch and the caller's caches are not kept data. A
change of the model during a sequence therefore does not delete the sequence's keys and values, as in one process.
"""

from __future__ import annotations

from torch import nn

from parallelformers_ng.batching.rounds import RankBatch
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.kernel_trial import KernelTrial
from parallelformers_ng.kernels import installation
from parallelformers_ng.sharding import look_ups


class RankState:
    """The data that one rank keeps from its calls for later calls.

    Attributes:
        steps: recorded decode steps (CUDA graphs): "call" for single calls, "rows" for batches.
        trial: decides whether Triton kernels compute CUDA graphs; None before the first graph, or without kernels.
    """

    def __init__(self) -> None:
        self.steps: dict[str, CapturedSteps] = {}
        self.batch: RankBatch | None = None
        self.trial: KernelTrial | None = None

    def forget_steps(self) -> None:
        """Delete the CUDA graphs of decode steps, and free the memory of their KV caches."""
        for steps in self.steps.values():
            steps.forget()

    def invalidate(self, model: nn.Module) -> None:
        """Delete all data that depends on the model's state. Must be called after every change of the model."""
        self.forget_steps()
        if self.batch is not None:
            self.batch.forget_prefixes()
        installation.forget(model)
        if self.trial is not None:
            self.trial.mode = None

    def drop(self, model: nn.Module | None) -> None:
        if model is not None:
            self.invalidate(model)
        self.batch = self.trial = None
        for steps in self.steps.values():
            steps.trial = None
        look_ups.forget()
