"""Defines every exception that this library raises on purpose.

Each exception is a `ParallelError`, so `except ParallelError` catches every error that parallelization adds. Each
message names the wrong argument or object, its value, the limit, and the next step if known.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ParallelError(Exception):
    """Base of every error raised on purpose by parallelformers_ng."""


class UnsupportedPlatformError(ParallelError):
    """Workers cannot run on this system: it is not Linux, `/proc` is missing, or gevent has patched Python."""


class UnsupportedModelError(ParallelError):
    """The library does not support the model: for example, no policy fits, or `torch.compile` has compiled the model.

    If no policy can be inferred, the message lists the failed attempts and says how to write a policy.
    """


class PolicyError(ParallelError):
    """A policy is wrong, is not proven, or does not fit the model: for example, a rule names a missing layer."""


class PlacementError(ParallelError):
    """The ranks cannot be placed: for example, there are fewer devices than ranks, or fewer layers than stages."""


class AlreadyParallelizedError(ParallelError):
    """`parallelize` was called on a model that is parallelized already."""


class NotParallelizedError(ParallelError):
    """A call needs a parallelized model, but the model is not or no longer parallelized."""


class CheckpointError(ParallelError):
    """A checkpoint is missing, incomplete, damaged or from another model, or an argument for saving is wrong.

    The message names the file or the argument.
    """


class GroupError(ParallelError):
    """Base of the errors of a group of workers."""


class StartupError(GroupError):
    """A worker could not start. The message ends with the last lines of the worker's standard error."""


class GroupClosedError(GroupError):
    """The group of workers was closed, by the caller or at interpreter shutdown."""


class WrongProcessError(GroupError):
    """A process used a group of workers that another process started, for example after `os.fork`."""


class WorkerDiedError(GroupError):
    """A worker process ended before its group was closed.

    Attributes:
        rank: rank of the worker.
        signal: number of the signal that ended the worker; None if the worker exited by itself.
        exit_code: exit code of the worker; None if a signal ended the worker.
        host: name of the worker's host; None if all workers run on one host.
    """

    def __init__(
        self, message: str, rank: int, signal: int | None = None, exit_code: int | None = None, host: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.signal, self.exit_code, self.host = rank, signal, exit_code, host


class RestartLimitError(GroupError):
    """The workers died too often or could not be restarted. The group makes no further attempt."""


class RequestTimeoutError(GroupError, TimeoutError):
    """A request missed its deadline. If a rank may hang, the message has each rank's position in the code."""


class DeadlineExpiredError(RequestTimeoutError):
    """The deadline of a call passed before the call was sent to the workers. The workers ran nothing."""


class ProtocolError(GroupError):
    """A message between two processes was malformed, too large or out of order. The receiver dropped the message."""


class ChannelClosedError(GroupError):
    """The process at the other end of a control channel closed the channel or ended."""


class NotPortableError(GroupError, TypeError):
    """An object cannot be copied to another process. The message names the argument or attribute with the object."""


class SharedMemoryError(GroupError):
    """The system had too little memory for shards, for collectives or for a message. Nothing was sent."""


class CollectiveAbortedError(GroupError):
    """A collective stopped because a rank raised an error, died or did not arrive, or because the group is ending."""


class DivergedError(GroupError):
    """Ranks returned different results for a request, or entered different collectives. The results were discarded."""


class WorkerError(GroupError):
    """An exception that a worker raised, raised again in the caller's process.

    The raised exception is also an instance of the original type, so `except ValueError` works. The caller's process
    must know the original type: builtins, torch, transformers and every imported module.

    Attributes:
        rank: rank of the worker that raised the exception.
        remote_traceback: traceback of the worker, as text.
    """

    rank: int = 0
    remote_traceback: str = ""


class BatchingError(ParallelError):
    """A call exceeds a limit of its batch or cannot join the batch, too many calls are waiting, or the batch failed.

    Attributes:
        option: name of the option of `batching=` whose limit the call exceeds; "" for another reason.
    """

    option = ""


class StaleCacheError(ParallelError):
    """A key/value cache was used after its workers had ended, or after a request failed while writing to the cache."""


class StateLostError(ParallelError):
    """Attributes that earlier calls changed in the model are lost, or differ between workers.

    The message names the attributes. Calls raise this error until the program sets them again, or calls
    `accept_lost_state()`.
    """


class RequestCancelledError(GroupError):
    """The caller cancelled a request. All ranks stopped at the same step."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the end of an error message, such as ` (did you mean 'timeout'?)`; "" if no known name is similar.

    Args:
        wrong: unknown name that the caller has used.
        known: valid names.
    """
    near = difflib.get_close_matches(wrong, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
