"""Run a Hugging Face model that is too big or too slow for one GPU, with one line of Python.

Public names load on first use. So a worker, which imports this package too, watches its parent before torch has loaded.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelformers_ng.api import parallelize, plan
    from parallelformers_ng.checkpoint.device_map import balanced_device_map
    from parallelformers_ng.errors import *
    from parallelformers_ng.model.groups import start_group
    from parallelformers_ng.model.saving import save_sharded
    from parallelformers_ng.options import BatchingOptions, FitOptions, QuantizeOptions, WorkerOptions
    from parallelformers_ng.planner.forecast import forecast
    from parallelformers_ng.runtime.limits import deadline
    from parallelformers_ng.sharding.rules import *
    from parallelformers_ng.worker.preload import warm_up

__all__ = [
    "AlreadyParallelizedError", "BatchingError", "BatchingOptions", "ChannelClosedError", "CheckpointError",
    "CollectiveAbortedError", "Column", "DeadlineExpiredError", "DivergedError", "Experts", "FitOptions", "Gather",
    "GaussianTopK", "GroupClosedError", "GroupError", "HeadNorms", "Heads", "Norm", "NotParallelizedError",
    "NotPortableError", "ParallelError", "Part", "PlacementError", "Policy", "PolicyError", "ProtocolError",
    "QuantizeOptions", "Reduce", "Renewed", "RequestCancelledError", "RequestTimeoutError", "RestartLimitError", "Row",
    "SharedMemoryError", "Slice", "StaleCacheError", "StartupError", "StateLostError", "Stored",
    "UnsupportedModelError", "UnsupportedPlatformError", "Vocabulary", "WorkerDiedError", "WorkerError",
    "WorkerOptions", "WrongProcessError", "balanced_device_map", "deadline", "forecast", "parallelize", "plan",
    "save_sharded", "start_group", "warm_up",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "balanced_device_map": "checkpoint.device_map",
    "deadline": "runtime.limits",
    "forecast": "planner.forecast",
    "parallelize": "api",
    "plan": "api",
    "save_sharded": "model.saving",
    "start_group": "model.groups",
    "warm_up": "worker.preload",
    "BatchingOptions": "options",
    "FitOptions": "options",
    "QuantizeOptions": "options",
    "WorkerOptions": "options",
}


_folder = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_folder, "policies")):
    # In a git clone the folder `policies/` is beside this package. Python then finds the clone's own policies, even if
    # another copy of this package is installed.
    __path__.append(os.path.dirname(_folder))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "errors" if name.endswith("Error") else "sharding.rules")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
