"""Keeps a rank's shard of an assistant: a small model that proposes tokens in `generate(assistant_model=…)`."""

from __future__ import annotations

from typing import Any

import torch

from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.sharding.inject import inject
from parallelformers_ng.worker.call import Assistance
from parallelformers_ng.worker.installing import install_kernels
from parallelformers_ng.worker.weights import RankWeights


class RankAssistant(RankWeights):
    """A rank's shard of an assistant, which is sharded over the same ranks as the model."""

    def __init__(self, rank: int, device: torch.device, emit: Any, communicator: Communicator) -> None:
        super().__init__(rank, device, emit)
        self._communicator = communicator

    def _clear(self) -> None:
        super()._clear()
        self._settings: dict[str, Any] = {}

    def build(self, skeleton: Skeleton) -> None:
        """Build this rank's modules, still without weights, and delete an earlier assistant."""
        self._clear()
        model, self.plan = skeleton.build()
        install_kernels(model, self.plan, self.device)
        inject(model, self.plan, self.rank, self._communicator)
        self.hold(model)

    def drop(self) -> None:
        self._clear()

    def take(self, assistance: Assistance) -> Any:
        """Apply the caller's generation settings to the assistant, and return it as an argument for `generate`."""
        if self.model is None:
            raise ParallelError("the workers were replaced after they got the assistant; repeat the call")
        self.model.generation_config = assistance.settings
        self._settings = {**vars(assistance.settings)}
        return self.model

    def changed_settings(self) -> dict[str, Any]:
        """Return the generation settings that `generate` has changed since `take`, by name."""
        now = vars(self.model.generation_config)
        return {name: value for name, value in now.items() if value != self._settings.get(name)}
