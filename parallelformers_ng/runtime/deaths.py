"""Why a group cannot be used any more, in words: what its callers are told from then on."""

from __future__ import annotations

import functools
from collections.abc import Callable

from parallelformers_ng.errors import GroupClosedError, GroupError, WrongProcessError

Ending = Callable[[], GroupError]


def closed() -> Ending:
    """The group was closed by its owner."""
    return functools.partial(GroupClosedError, "the worker group was closed; parallelize the model again to use it")


def at_exit() -> GroupClosedError:
    """The interpreter is on its way out."""
    return GroupClosedError("the worker group has ended, because the interpreter is shutting down")


def not_interrupted(seconds: float) -> Ending:
    """After Ctrl-C, the workers did not leave the request within `seconds`."""
    return functools.partial(
        GroupError,
        f"the worker group was ended: the workers did not leave an interrupted request within {seconds:g} s;"
        " parallelize the model again to use it",
    )


def overdue(request: str) -> Ending:
    """A request ran past its deadline; `request` says which."""
    return functools.partial(GroupError, f"the worker group was ended, because an earlier request {request}")


def as_before(error: GroupError) -> Ending:
    """The same error again."""
    return functools.partial(type(error), *error.args)


def wrong_process(owner: int, this: int) -> WrongProcessError:
    """The group belongs to process `owner`, and this is another."""
    return WrongProcessError(
        f"this worker group belongs to process {owner}, this is {this}; a forked process must "
        "parallelize the model itself (gunicorn: without --preload; multiprocessing: start method 'spawn')"
    )
