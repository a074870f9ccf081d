"""Defines a request from its caller's side: encodes the arguments, waits for the answers, and decodes the answers."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from parallelformers_ng.errors import DeadlineExpiredError, GroupError, WorkerError
from parallelformers_ng.runtime import failures
from parallelformers_ng.wire.frame import Frame, FrameKind
from parallelformers_ng.wire.message import Encoded, decode, encode

Answers = dict[int, Frame]
"""Rank → answer frame of the rank, not yet decoded."""


def call_of(method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Encoded:
    """Encode a method call in the form that `Service` decodes.

    Args:
        method: name of a public method of the target.
        args, kwargs: positional arguments, and keyword arguments by name.

    Raises:
        NotPortableError: an argument cannot be sent, see `encode`.
    """
    return encode({"method": method, "args": args, "kwargs": kwargs or {}})


class Request:
    """A method that every rank runs. The caller waits in `next`; the group's thread delivers answers with `put`.

    Args:
        method: name of the method, for error messages.
        messages: encoded arguments: one message for all ranks, or one message per rank.
        flags: flags of the request, see `Flag`.
        deadline: latest time of the answers, in seconds of `time.monotonic`; infinity until `set_deadline` is called.

    Attributes:
        method, messages, flags, deadline: the arguments of the same names.
        seconds: time between setting the deadline and the deadline, in seconds.
        begun: whether the group's thread has started the request.
        given_up: whether the caller no longer waits.
        updates: messages for the ranks that arrived after the arguments; see `FrameKind.UPDATE`.
    """

    def __init__(self, method: str, messages: Sequence[Encoded], flags: int = 0, deadline: float = math.inf) -> None:
        self.method, self.messages, self.flags = method, messages, flags
        self.set_deadline(deadline)
        self.begun = self.given_up = False
        self.updates: deque[Encoded] = deque()
        self._inbox: queue.SimpleQueue[Frame | Answers | GroupError | None] = queue.SimpleQueue()

    def set_deadline(self, deadline: float) -> None:
        """Set the latest time of the answers, in seconds of `time.monotonic`."""
        self.deadline, self.seconds = deadline, deadline - time.monotonic()

    def prepare(self) -> bool:
        """Return whether to send the request; the group's thread calls this method at the request's turn."""
        return True

    def put(self, item: Frame | Answers | GroupError | None) -> None:
        """Give the caller an event frame, or the last item: the answers, an error, or None if the group ended."""
        self._inbox.put(item)
        if self.given_up:
            self.discard()

    def next(self, pause: float = math.inf) -> Frame | Answers | GroupError | None:
        """Wait for the next item of `put` and return it. Ctrl-C and errors from signal handlers end the wait.

        Args:
            pause: longest wait in seconds after the request has begun, and before it has begun.

        Raises:
            queue.Empty: no item came within `pause`.
            DeadlineExpiredError: the deadline passed before the group's thread started the request.
        """
        if not self.begun:
            try:
                rest = max(self.deadline - time.monotonic(), 0.0)
                return self._inbox.get(timeout=min(rest, pause, threading.TIMEOUT_MAX))
            except queue.Empty:
                if not self.begun and time.monotonic() >= self.deadline:
                    raise self.expired() from None
                if pause < math.inf:
                    raise
        return self._inbox.get(timeout=None if pause == math.inf else pause)  # the group's thread enforces the deadline

    def expired(self) -> DeadlineExpiredError:
        """Return the error of a request whose deadline passed before it was sent."""
        return DeadlineExpiredError(
            f"{self.method!r} did not start within {self.seconds:.3g} s; the workers were busy with other calls"
        )

    def discard(self) -> None:
        """Close the file descriptors in items that the caller will not read."""
        while not self._inbox.empty():
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            frames = [item] if isinstance(item, Frame) else item.values() if isinstance(item, dict) else ()
            for frame in frames:
                frame.discard()


def read(answers: Answers) -> tuple[list[Any], WorkerError | None]:
    """Decode the answers of all ranks.

    Args:
        answers: rank → answer frame.

    Returns:
        (value of each rank, error): if ranks raised, the exception that best explains the failure; otherwise None.

    Raises:
        NotPortableError: an answer cannot be decoded in this process.
        ProtocolError: an answer is malformed.
    """
    values: list[Any] = [None] * len(answers)
    raised: dict[int, Any] = {}
    try:
        for rank, frame in answers.items():
            if frame.kind is FrameKind.RESULT:
                values[rank] = decode(frame)
            elif frame.kind is FrameKind.ERROR:
                raised[rank] = decode(frame)
    finally:
        for frame in answers.values():
            frame.discard()
    if not raised:
        return values, None
    errors = {rank: failures.rebuild(rank, description) for rank, description in raised.items()}
    broken = [error for error in errors.values() if isinstance(error, torch.AcceleratorError)]
    # The exception of the lowest rank without an aborted collective explains a failure best.
    return values, broken[0] if broken else errors[min(raised, key=lambda rank: (raised[rank].aborted, rank))]
