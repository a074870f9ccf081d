"""Whether the steps of calls that are decoded together become CUDA graphs."""

from __future__ import annotations

import logging
import sys
from typing import Any

from parallelformers_ng.cuda_graphs.modes import MOST_POSITIONS, StaticSteps, static_generation
from parallelformers_ng.hooks.registry import HookRegistry

log = logging.getLogger("parallelformers_ng")


class RowSteps:
    """The decision for one model. It falls when rows are decoded, and once it is no, it stays.

    Args:
        steps: how decode steps are compiled or captured, None if they are not.
        hooks: the caller's.
    """

    def __init__(self, steps: StaticSteps | None, hooks: HookRegistry) -> None:
        self._steps = steps if steps is not None and steps.captured else None
        self._hooks = hooks

    def positions(self, model: Any) -> int:
        """Return rows × tokens of the largest cache over which steps become CUDA graphs; 0 if none do."""
        if (
            self._steps is None
            or self._hooks.present()
            or static_generation(model, {"max_new_tokens": 1}, self._steps)[1]
        ):
            return 0
        return MOST_POSITIONS if self._steps.by_default else sys.maxsize

    def give_up(self, why: str) -> None:
        """Take in that the ranks could not record a step."""
        if self._steps is not None:
            level = logging.INFO if self._steps.by_default else logging.WARNING
            log.log(level, "calls that are decoded together run without CUDA graphs: %s", why)
            self._steps = None
