"""Gives a call on a rank the caller's grad mode and the caller's states of the generators of `random` and NumPy."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.worker.call import Call

_COLLECTIVES = ("all_reduce", "all_gather")
_ABOUT_GRADIENTS = ("require grad", "requires grad", "nference tensor", "InferenceMode", "used in the graph")
"""Parts of torch's messages about gradients that cannot be computed."""


@contextlib.contextmanager
def callers_modes(call: Call, communicator: Communicator) -> Iterator[None]:
    if call.draws is not None:
        set_draw_states(call.draws)
    if call.grad is not None:
        vars(communicator).update((name, _refusing(getattr(communicator, name))) for name in _COLLECTIVES)
    try:
        with torch.inference_mode() if call.grad is None else torch.set_grad_enabled(call.grad):
            yield
    except RuntimeError as error:
        if call.grad is None or not any(part in str(error) for part in _ABOUT_GRADIENTS):
            raise
        raise _refusal(str(error).splitlines()[0]) from error
    finally:
        for name in _COLLECTIVES:
            vars(communicator).pop(name, None)


def _refusing(collective: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(collective)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise _refusal("the output of a parallel layer requires a gradient")
        return collective(tensor, *args, **kwargs)

    return run


def _refusal(why: str) -> ParallelError:
    return ParallelError(
        "code of the model, a hook or a processor asks for a gradient through layers or weights, which the workers do"
        f" not compute: {why}. Call deparallelize() first"
    )


def draw_states() -> Any:
    return random.getstate(), np.random.get_state()


def set_draw_states(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def changed_draws(before: Any) -> Any:
    """Return the present states of `random` and `numpy.random`, or None if they equal `before`."""
    after = draw_states()
    same = after[0] == before[0] and all(map(np.array_equal, after[1], before[1]))
    return None if same else after
