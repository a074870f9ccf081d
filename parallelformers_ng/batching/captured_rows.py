"""Runs the decode steps of a batch as CUDA graphs, with keys and values in a static cache.

Rows join and leave the batch's growing cache. A step first copies the growing cache to the static cache, unless the
last step used the same static cache. After the step the growing cache is a view of the static cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from parallelformers_ng.batching.row_caches import keeps_all
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.static_caches import LENGTH_STEP, bucket_of


class CapturedRows:
    """The recorded steps of one rank's batches, grouped by the number of rows.

    Args:
        model: model of the rank.
        steps: function that returns the recorded steps, or the reason why steps cannot be recorded.

    Attributes:
        reason: why a step ran without a recording; "" if every step had a recording.
    """

    def __init__(self, model: PreTrainedModel, steps: Callable[[], CapturedSteps | str]) -> None:
        self.reason = ""
        self._model = model
        self._steps = steps

    def run(
        self, growing: Any, shape: tuple[int, int], positions: int, inputs: Callable[[Any], dict[str, Any]]
    ) -> Any | None:
        """Run one decode step from a recording, if possible.

        If the step ran, the keys and values of `growing` are afterwards views of a static cache.

        Args:
            growing: cache of the batch.
            shape: rows and tokens of the cache, including the token of this step.
            positions: most rows × tokens of a static cache.
            inputs: function that returns the model's arguments for a cache.

        Returns:
            The model's output; None if the caller must run the step without a recording.
        """
        rows, columns = shape
        length = max(LENGTH_STEP, bucket_of(columns))  # up to half is unused, but one recording serves many lengths
        if bucket_of(rows) * length > positions:
            return None
        steps = self._steps()
        if isinstance(steps, str):
            self.reason = steps
            return None
        if not keeps_all(growing):
            self.reason = f"rows of this model's {type(growing).__name__} cannot be copied to a static cache"
            return None
        static = steps.cache(rows, columns, length, lambda: StaticCache(self._model.config, max_cache_len=length))
        if static is None:
            self.reason = steps.reason
            return None
        static.take(growing, columns - 1)
        output = steps.run(self._model, static, inputs(static.cache))
        static.lend(growing, columns)
        self.reason = self.reason or steps.reason
        return output
