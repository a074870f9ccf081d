"""Every exception that this library raises on purpose.

All of them are `ParallelError`, so one `except` catches whatever parallelization adds to a program. Each message names
the culprit, the offending value, the limit and, if there is one, the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ParallelError(Exception):
    """Base of every error raised on purpose by parallelformers_ng."""


class UnsupportedPlatformError(ParallelError):
    """The operating system lacks what the workers need (Linux: memfd, pidfd)."""


class UnsupportedModelError(ParallelError):
    """No policy fits this model; the message says what was tried and how to write one."""


class PolicyError(ParallelError):
    """A policy does not fit the model it was applied to: a rule without a layer, a layer that cannot be cut so."""


class PlacementError(ParallelError):
    """The devices asked for do not exist, or fewer exist than asked for."""


class AlreadyParallelizedError(ParallelError):
    """`parallelize` was called on a model that is parallelized already."""


class NotParallelizedError(ParallelError):
    """The model is not, or no longer, parallelized."""


class CheckpointError(ParallelError):
    """A checkpoint is missing, incomplete, damaged or not of this model. The message names the file."""


class GroupError(ParallelError):
    """Something about the worker group failed; the base of nearly all errors below."""


class StartupError(GroupError):
    """A worker could not start. The message carries the end of its standard error."""


class GroupClosedError(GroupError):
    """The group was closed, by the caller or at interpreter shutdown."""


class WrongProcessError(GroupError):
    """The group was used from a process that did not start it, for example after `os.fork`."""


class WorkerDiedError(GroupError):
    """A worker process ended while it was needed.

    Attributes:
        rank: the worker's rank.
        signal: the signal that ended it, or None if it exited by itself.
        exit_code: its exit code, or None if a signal ended it.
        host: the host that it ran on, or None if the group is on one alone.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        signal: int | None = None,
        exit_code: int | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal
        self.exit_code = exit_code
        self.host = host


class RestartLimitError(GroupError):
    """The workers died too often, or could not be started again, and stay down for good."""


class RequestTimeoutError(GroupError, TimeoutError):
    """A request did not finish before its deadline."""


class DeadlineExpiredError(RequestTimeoutError):
    """The deadline of a call passed before the call was sent: nothing was run, and nothing has changed."""


class ProtocolError(GroupError):
    """A control message was malformed, too large or out of order. It was not decoded further."""


class ChannelClosedError(GroupError):
    """The other end of a control channel is gone."""


class NotPortableError(GroupError, TypeError):
    """An object cannot cross to another process by value. The message names where it was found."""


class SharedMemoryError(GroupError):
    """The system had no memory for shards, for the collectives, or for a message. Nothing was sent."""


class CollectiveAbortedError(GroupError):
    """A collective was given up because a peer raised, died or the group is ending."""


class DivergedError(GroupError):
    """Ranks that must agree did not; the answer was discarded."""


class WorkerError(GroupError):
    """An exception raised inside a worker, brought back to the caller.

    If the original type can be named here (builtins, torch, transformers, anything already imported), the raised
    exception is an instance of that type as well, so `except ValueError` goes on working.

    Attributes:
        rank: the rank whose traceback is shown.
        remote_traceback: the traceback as the worker printed it.
    """

    rank: int = 0
    remote_traceback: str = ""


class BatchingError(ParallelError):
    """A call cannot share a batch with others, or there are more than may wait.

    Attributes:
        option: option of `batching=` whose limit refuses the call; "" if none does.
    """

    option = ""


class StaleCacheError(ParallelError):
    """A key/value cache was used after its workers were gone, or after a request failed while it was writing to it."""


class RequestCancelledError(GroupError):
    """A request was stopped at its caller's wish, on all ranks at the same step."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """` (did you mean 'timeout'?)`, for the end of a message; "" if none of the known names is near."""
    near = difflib.get_close_matches(wrong, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
