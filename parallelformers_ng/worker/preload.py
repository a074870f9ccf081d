"""Starts the imports of the process that forks ranks. Importing this module itself is fast."""

from __future__ import annotations

from parallelformers_ng.runtime import forks

# Module that the fork server imports before it forks ranks of a model.
IMPORTS = "parallelformers_ng.worker.imports"


def warm_up() -> None:
    """Start to import, in another process, the modules that workers need, so that the first `parallelize` is faster.

    Returns at once. Call this function before loading a model that will be parallelized. The function does nothing if
    the environment variable `PARALLELFORMERS_NG_FORK_SERVER` is 0.
    """
    forks.running(IMPORTS)
