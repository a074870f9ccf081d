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
    """Have generations of this process within `deferring` end a step late, from now on. Idempotent.

    What the step too many looks up is not held against the request: its position may lie beyond a table.
    """
    check = utils.DeferredStopCheck
    if not hasattr(check.finish, "__wrapped__"):
        check.is_supported = staticmethod(_supported(check.is_supported))
        check.__call__ = _holding(check.__call__)
        check.finish = _taking_back(check.finish)


def _supported(usual: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(usual)
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        unseen = _allowed and not cache_is_returned
        return unseen and usual(_DEFERRING, cache, cache_is_returned, is_assistant)

    return is_supported


def _holding(usual: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(usual)
    def call(check: Any, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        stops = usual(check, unfinished_sequences, tokens, length)
        if not stops:
            look_ups.hold()
        return stops

    return call


def _taking_back(usual: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(usual)
    def finish(check: Any) -> int:
        undone = usual(check)
        if undone:
            look_ups.take_back()
        return undone

    return finish


@contextlib.contextmanager
def deferring(allowed: bool) -> Iterator[None]:
    """Around a request.

    Args:
        allowed: whether a step too many goes unnoticed in it, if its cache is not handed out either.
    """
    global _allowed
    _allowed = allowed
    try:
        yield
    finally:
        _allowed = False
