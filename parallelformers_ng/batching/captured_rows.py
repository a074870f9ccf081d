"""The steps of a batch as CUDA graphs: while rows are decoded, their keys and values lie in a static cache.

Rows join and leave in the batch's own cache, which grows. Before a step the static one takes what it holds, unless the
last step left it there; after the step the batch's cache is a view of the static one.
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
    """The recorded steps of one rank's batches, in buckets of rows.

    Args:
        model: the rank's.
        steps: gives those that are recorded, or says why none can be.

    Attributes:
        reason: why a step ran plainly instead of from a recording, "" if none did.
    """

    def __init__(self, model: PreTrainedModel, steps: Callable[[], CapturedSteps | str]) -> None:
        self.reason = ""
        self._model = model
        self._steps = steps

    def run(
        self, growing: Any, shape: tuple[int, int], positions: int, inputs: Callable[[Any], dict[str, Any]]
    ) -> Any | None:
        """Return one step.

        Args:
            growing: the batch's cache.
            shape: its rows, and its tokens with that of this step.
            positions: rows × tokens that a static cache may have.
            inputs: the model's arguments over a cache.

        Returns:
            What the model gave; None if the step is to run as it is.
        """
        rows, columns = shape
        length = max(LENGTH_STEP, bucket_of(columns))  # of half of it a step reads nothing, and it is recorded once
        if bucket_of(rows) * length > positions:
            return None
        steps = self._steps()
        if isinstance(steps, str):
            self.reason = steps
            return None
        if not keeps_all(growing):
            self.reason = f"rows join no static cache out of a {type(growing).__name__} of this model"
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
