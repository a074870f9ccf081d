"""Lists everything that a rank keeps of its calls for later ones, and lets it go.

| what | where | what of the model it depends on |
| --- | --- | --- |
| recorded steps and their caches | `cuda_graphs.captured.CapturedSteps` | attributes, configurations, adapters, hooks |
| keys and values of earlier sequences | `batching.prefixes.Prefixes` | the same |
| the choice between kernels and modules | `cuda_graphs.kernel_trial.KernelTrial` | the same |
| modules that those kernels replace | `kernels.step_kernels.forget` | the same |
| addresses and sizes that the C kernels read | `kernels.installation.forget` | attributes, hooks |
| the configuration, mask and angles of the latest step | `kernels.decoder_layer.Step` | the same |
| bounds of ids that were looked up on a device | `sharding.look_ups` | nothing; let go with the model |

Weights do not change while a model is parallelized. The rows of a batch and the caches of the caller are no copies: a
change in the middle of a sequence finds them as it would in one process.
"""

from __future__ import annotations

from torch import nn

from parallelformers_ng.batching.rounds import RankBatch
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.kernel_trial import KernelTrial
from parallelformers_ng.kernels import installation, step_kernels
from parallelformers_ng.sharding import look_ups


class Kept:
    """Everything that one rank keeps of its calls.

    Attributes:
        steps: recorded steps, by the kind of calls: single ones, and those that are decoded together.
        batch: the calls that are decoded together, None before the first.
        trial: decides whether kernels compute recorded steps; None before the first, or without such kernels.
    """

    def __init__(self) -> None:
        self.steps: dict[str, CapturedSteps] = {}
        self.batch: RankBatch | None = None
        self.trial: KernelTrial | None = None

    def forget_steps(self) -> None:
        """Let go of recorded steps, and of the memory of their caches."""
        for steps in self.steps.values():
            steps.forget()

    def let_go(self, model: nn.Module) -> None:
        """Let go of everything that was computed before a change. Every change of the model calls this."""
        self.forget_steps()
        if self.batch is not None:
            self.batch.forget_prefixes()
        installation.forget(model)
        step_kernels.forget(model)
        if self.trial is not None:
            self.trial.mode = None

    def drop(self, model: nn.Module | None) -> None:
        """Let go of everything, with the model."""
        if model is not None:
            self.let_go(model)
        self.batch = self.trial = None
        for steps in self.steps.values():
            steps.trial = None
        look_ups.forget()
