"""A rank's model that says what its process keeps."""

from __future__ import annotations

from parallelformers_ng.kernels.decoder_layer import Step
from parallelformers_ng.worker.runner import ModelRunner


class WatchedRunner(ModelRunner):
    def kept_steps(self) -> int:
        """How many steps are remembered, with the configuration and tensors that they refer to."""
        return len(Step._latest)
