"""The imports of the process that forks ranks. Importing this file imports nothing that takes long."""

from __future__ import annotations

from parallelformers_ng.runtime import forks

IMPORTS = "parallelformers_ng.worker.imports"
"""The module that such a process imports before it forks ranks of a model."""


def warm_up() -> None:
    """Start importing what workers need, in a process beside this one, so that the first `parallelize` finds it done.

    Returns at once. Whoever knows that a model is about to be parallelized calls it first, then loads the model.
    """
    forks.running(IMPORTS)
