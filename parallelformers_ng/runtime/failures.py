"""Sends exceptions from a worker to the caller as names, arguments and text: the caller may not know the class of an
exception, and must not run its constructor."""

from __future__ import annotations

import functools
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

from parallelformers_ng.errors import CollectiveAbortedError, ProtocolError, WorkerError

_ARGUMENT_TYPES = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Description:
    """An exception of a worker in the form in which it is sent to the caller.

    Attributes:
        args: arguments of the exception; None if one of them is not a number, string, bool or None.
        aborted: whether an aborted collective caused the exception, usually after an exception of another rank.
        attributes: attributes of the exception that consist of numbers and strings, such as its notes.
    """

    module: str
    qualname: str
    args: list[Any] | None
    message: str
    traceback: str
    aborted: bool
    attributes: dict[str, Any] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)


def describe(error: BaseException, is_consequence: bool = False) -> Description:
    """Describe an exception for the caller; `is_consequence`: an aborted collective has caused it."""
    cls = type(error)
    plain = all(type(argument) in _ARGUMENT_TYPES for argument in error.args)
    text = "".join(traceback.format_exception(error))
    aborted = is_consequence or isinstance(error, CollectiveAbortedError)
    return Description(
        cls.__module__,
        cls.__qualname__,
        list(error.args) if plain else None,
        _message(error),
        text,
        aborted,
        {name: value for name, value in vars(error).items() if _is_plain(value)},
        [describe(part) for part in error.exceptions] if isinstance(error, BaseExceptionGroup) else [],
    )


def rebuild(rank: int, description: Any) -> WorkerError:
    """Return the exception to raise in the caller: a WorkerError that is, if possible, also of the original type."""
    if not isinstance(description, Description):
        raise ProtocolError(f"rank {rank} sent an exception in an unknown format")
    name, message = f"{description.module}.{description.qualname}", description.message
    args = description.args
    if description.parts:
        args = [message.rpartition(" (")[0], [rebuild(rank, part) for part in description.parts]]
    error = _rebuild_as(_find(description.module, description.qualname), args, message)
    if error is None:
        error = WorkerError(f"{name}: {message}" if message else name)
    vars(error).update(description.attributes)
    error.rank = rank
    error.remote_traceback = description.traceback
    error.add_note(f"\nTraceback of rank {rank}:\n{error.remote_traceback.rstrip()}")
    return error


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    return type(value) in _ARGUMENT_TYPES


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # report the traceback even if `__str__` fails
        return f"(its __str__ raised {type(broken).__name__})"


def _find(module: str, qualname: str) -> Any:
    """Return the exception class with this module and name, or None if this process has not imported it."""
    owner: Any = sys.modules.get(module)
    for part in qualname.split("."):
        owner = vars(owner).get(part) if hasattr(owner, "__dict__") else None
    return owner if isinstance(owner, type) and issubclass(owner, Exception) else None


def _rebuild_as(cls: Any, args: Any, message: str) -> WorkerError | None:
    combined = None if cls is None else _combined(cls)
    if combined is None:
        return None
    arguments = tuple(args) if isinstance(args, list) else (message,)
    # No `__init__` runs, so its signature does not matter. Return None if the rebuilt exception has another text.
    try:
        error = combined.__new__(combined, *arguments)
        error.args = arguments
    except TypeError:  # a `__new__` of the class may refuse these arguments
        return None
    return error if _message(error) == message else None


@functools.cache
def _combined(cls: Any) -> type[WorkerError] | None:
    if issubclass(cls, WorkerError):
        return cls
    try:
        return type(cls.__name__, (WorkerError, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    except TypeError:  # Python cannot combine the memory layouts of the two bases
        return None
