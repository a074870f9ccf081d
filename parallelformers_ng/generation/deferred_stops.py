"""Lets `generate` check for the end of a generation one step late, so that the host never waits for a CUDA device.

After each token, `generate` reads from the device whether all sequences have ended. The host waits for that answer, and
the device then waits for the host to queue the next step. transformers can read the answer one step later: the host
queues a step while the device computes the step before. One extra step may run; its result is thrown away. transformers
checks late only on MPS devices; this module enables late checks on CUDA devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils

from parallelformers_ng.generation.wrapping import wrap_once
from parallelformers_ng.runtime.limits import set_within
from parallelformers_ng.sharding import look_ups

_DEFERRING = torch.device("mps")
# Whether the current request may run an extra step after its last token. The step's result is thrown away.
_allowed = ContextVar("allowed", default=False)


def defer_stops() -> None:
    """Patch transformers: inside `deferring(True)`, `generate` may stop one step late. Idempotent.

    Token and position ids of the extra step may be out of range, and raise no error.
    """
    check = utils.DeferredStopCheck
    if not hasattr(check.finish, "__wrapped__"):
        check.is_supported = staticmethod(_supported(check.is_supported))
    wrap_once(check, "__call__", _saving_look_ups)
    wrap_once(check, "finish", _restoring_look_ups)


def _supported(usual: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(usual)
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        # A generation that returns its cache never runs an extra step, which would lengthen the cache.
        unseen = _allowed.get() and not cache_is_returned
        return unseen and usual(_DEFERRING, cache, cache_is_returned, is_assistant)

    return is_supported


def _saving_look_ups(usual: Callable[..., bool]) -> Callable[..., bool]:
    def call(check: Any, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        stops = usual(check, unfinished_sequences, tokens, length)
        if not stops:
            look_ups.hold()
        return stops

    return call


def _restoring_look_ups(usual: Callable[..., int]) -> Callable[..., int]:
    def finish(check: Any) -> int:
        undone = usual(check)
        if undone:
            look_ups.take_back()
        return undone

    return finish


def deferring(allowed: bool) -> AbstractContextManager[None]:
    return set_within(_allowed, allowed)
