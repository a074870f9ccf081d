"""Replicas whose CPU workers record decode steps as GPU workers do, by operators. Imported by workers alone."""

from __future__ import annotations

from typing import Any

import parallelformers_ng.replica as replica_module
from parallelformers_ng.generation.recorder import Recorder
from parallelformers_ng.replica import Replica
from tests.operator_recorder import OperatorRecorder

# The kernels in C are no operators, and no part of what runs on a GPU.
replica_module.install = lambda model: 0  # type: ignore[assignment]
replica_module.install_attention = lambda: None  # type: ignore[assignment]


class RecordedReplica(Replica):
    """Counts what was recorded. `spoil` makes something go wrong on one rank or on all."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.operators = OperatorRecorder()

    def recorder(self) -> Recorder | str:
        return self.operators

    def counted(self) -> tuple[int, int]:
        """Recordings and replays since the last time that this was asked."""
        counts = self.operators.recordings, self.operators.replays
        self.operators.recordings = self.operators.replays = 0
        return counts
