"""Decides whether the decode steps of a batch become CUDA graphs."""

from __future__ import annotations

import logging
import sys
from typing import Any

from parallelformers_ng.cuda_graphs.modes import MOST_POSITIONS, StaticSteps, static_generation
from parallelformers_ng.hooks.registry import HookRegistry

log = logging.getLogger("parallelformers_ng")


class RowSteps:
    """The decision for one model whether decode steps of a batch become CUDA graphs; after `give_up`, always no.

    Args:
        steps: mode that compiles or captures decode steps; None for ordinary decode steps.
        hooks: forward hooks of the caller.
        required: whether calls may share a batch only if decode steps become CUDA graphs.
    """

    def __init__(self, steps: StaticSteps | None, hooks: HookRegistry, required: bool) -> None:
        self._required = required
        self._steps = steps if steps is not None and steps.captured else None
        self._hooks = hooks

    def positions(self, model: Any) -> int:
        """Return the largest cache, in rows × tokens, whose decode steps become CUDA graphs; 0 for no CUDA graphs.

        `sys.maxsize` stands for no limit: the caller asked for CUDA graphs.

        Args:
            model: the parallelized model, whose class and settings may exclude CUDA graphs.

        Raises:
            ParallelError: a hook of the model cannot run on the workers.
        """
        if (
            self._steps is None
            or self._hooks.present()
            or static_generation(model, {"max_new_tokens": 1}, self._steps)[1]
        ):
            return 0
        return MOST_POSITIONS if self._steps.by_default else sys.maxsize

    def why_alone(self, model: Any) -> str:
        """Return the reason why calls of a model may not share a batch, as text; "" if calls may share a batch.

        Args:
            model: the parallelized model.
        """
        return "its decode steps do not become CUDA graphs" if self._required and not self.positions(model) else ""

    def give_up(self, why: str) -> None:
        """Stop using CUDA graphs, because the ranks could not record a step; log the reason `why`."""
        if self._steps is not None:
            level = logging.INFO if self._steps.by_default else logging.WARNING
            log.log(level, "calls that are decoded together run without CUDA graphs: %s", why)
            self._steps = None
