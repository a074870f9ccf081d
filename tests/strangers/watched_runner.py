"""A runner that reports the state its process keeps."""

from __future__ import annotations

from parallelformers_ng.kernels.decoder_layer import Step
from parallelformers_ng.worker.runner import ModelRunner


class WatchedRunner(ModelRunner):
    def kept_steps(self) -> int:
        """Return the number of remembered steps, with the configuration and tensors they refer to."""
        return len(Step._latest)
