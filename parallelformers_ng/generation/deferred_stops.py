"""The end of a generation on a device, told one step late.

After each token the host asks whether all sequences have ended, and waits for the device, which then waits for the
host to bring the next step. transformers can ask a step late: the host brings a step while the device computes the one
before, and a step too many is undone. It does so on one kind of device (MPS); here it does on CUDA devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation import utils

from parallelformers_ng.sharding import look_ups

_DEFERRING = torch.device("mps")
_is_supported = utils.DeferredStopCheck.is_supported


class DeferredStops(utils.DeferredStopCheck):
    """transformers' check, for generations within `deferring` whose caches nobody sees afterwards.

    What the step too many looks up is not held against the request: its position may lie beyond a table.

    Attributes:
        allowed: whether a step too many goes unnoticed in the request that runs.
    """

    allowed: ClassVar[bool] = False

    @staticmethod
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        unseen = DeferredStops.allowed and not cache_is_returned
        return unseen and _is_supported(_DEFERRING, cache, cache_is_returned, is_assistant)

    def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        stops = super().__call__(unfinished_sequences, tokens, length)
        if not stops:
            look_ups.hold()
        return stops

    def finish(self) -> int:
        undone = super().finish()
        if undone:
            look_ups.take_back()
        return undone


def defer_stops() -> None:
    """Have generations of this process end by `DeferredStops`, from now on."""
    utils.DeferredStopCheck = DeferredStops


@contextlib.contextmanager
def deferring(allowed: bool) -> Iterator[None]:
    """Around a request.

    Args:
        allowed: as in `DeferredStops`.
    """
    DeferredStops.allowed = allowed
    try:
        yield
    finally:
        DeferredStops.allowed = False
