"""The end of a generation on a device, told one step late.

After each token the host asks whether all sequences have ended, and waits for the device, which then waits for the
host to bring the next step. transformers can ask a step late: the host brings a step while the device computes the one
before, and a step too many is undone. It does so on one kind of device (MPS); here it does on CUDA devices.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils

from parallelformers_ng.sharding import look_ups

_DEFERRING = torch.device("mps")
_allowed = False
"""Whether a step too many goes unnoticed in the request that runs."""


def defer_stops() -> None:
    """Have transformers' check defer stops in this process, from now on, in generations within `deferring` whose caches
    nobody sees afterwards. What the step too many looks up is not held against the request: its position may lie beyond
    a table. Idempotent."""
    check = utils.DeferredStopCheck
    if not hasattr(check.__call__, "__wrapped__"):
        check.is_supported = staticmethod(_if_unseen(check.is_supported))
        check.__call__ = _holding(check.__call__)
        check.finish = _taking_back(check.finish)


def _if_unseen(is_supported: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(is_supported)
    def is_supported_if_unseen(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        unseen = _allowed and not cache_is_returned
        return unseen and is_supported(_DEFERRING, cache, cache_is_returned, is_assistant)

    return is_supported_if_unseen


def _holding(call: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(call)
    def stops(self: Any, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        found = call(self, unfinished_sequences, tokens, length)
        if not found:
            look_ups.hold()
        return found

    return stops


def _taking_back(finish: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(finish)
    def finished(self: Any) -> int:
        undone = finish(self)
        if undone:
            look_ups.take_back()
        return undone

    return finished


@contextlib.contextmanager
def deferring(allowed: bool) -> Iterator[None]:
    """Around a request.

    Args:
        allowed: whether a step too many goes unnoticed in it.
    """
    global _allowed
    _allowed = allowed
    try:
        yield
    finally:
        _allowed = False
