"""Defines a request from its caller's side: encodes the arguments, waits for the answers, and decodes the answers."""

from __future__ import annotations

import math
import queue
import reprlib
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

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Answers = dict[int, Frame]  # rank → the rank's answer, a frame that is not decoded yet


def call_of(method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Encoded:
    return encode({"method": method, "args": args, "kwargs": kwargs or {}})


class Request:
    """A method that every rank runs. The caller waits in `next`; the group's thread delivers answers with `put`.

    Attributes:
        arguments: arguments of one rank, for texts about the request.
        seconds: time from the call of `set_deadline` to the deadline.
        updates: further messages for the ranks while they run the request; see `FrameKind.UPDATE`.
    """

    arguments: Arguments = (), {}

    def __init__(self, method: str, messages: Sequence[Encoded], flags: int = 0, deadline: float = math.inf) -> None:
        self.method, self.messages, self.flags = method, messages, flags
        self.set_deadline(deadline)
        self.begun = self.given_up = False
        self.updates: deque[Encoded] = deque()
        self._inbox: queue.SimpleQueue[Frame | Answers | GroupError | None] = queue.SimpleQueue()

    def set_deadline(self, deadline: float) -> None:
        self.deadline, self.seconds = deadline, deadline - time.monotonic()

    def prepare(self) -> bool:
        """Return whether to send the request. The group's thread calls this method when the request is next."""
        return True

    def put(self, item: Frame | Answers | GroupError | None) -> None:
        """Queue an event for the caller, or the last item: the answers, an error, or None if the group has ended."""
        self._inbox.put(item)
        if self.given_up:
            self.discard()

    def next(self, pause: float = math.inf) -> Frame | Answers | GroupError | None:
        """Wait for the next item of `put` and return it. Ctrl-C and errors from signal handlers end the wait."""
        if not self.begun:
            try:
                rest = max(self.deadline - time.monotonic(), 0.0)
                return self._inbox.get(timeout=min(rest, pause, threading.TIMEOUT_MAX))
            except queue.Empty:
                if not self.begun and time.monotonic() >= self.deadline:
                    raise self.expired() from None
                if pause < math.inf:
                    raise
        # The group's thread enforces the deadline of a request that has begun.
        return self._inbox.get(timeout=None if pause == math.inf else pause)

    def expired(self) -> DeadlineExpiredError:
        return DeadlineExpiredError(
            f"{self.method!r} did not start within {self.seconds:.3g} s; the workers were busy with other calls"
        )

    def discard(self) -> None:
        """Close the file descriptors of the frames that the caller will not read."""
        while not self._inbox.empty():
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            frames = [item] if isinstance(item, Frame) else item.values() if isinstance(item, dict) else ()
            for frame in frames:
                frame.discard()


def described(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return a call as text, with the shapes of tensors. No code of the program runs for the text."""
    words = [*map(brief, args), *(f"{name}={brief(value)}" for name, value in kwargs.items())]
    return f"{method}({', '.join(words)})"


def brief(value: Any) -> str:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value is None or kind in (bool, int, float, str):
        return reprlib.repr(value)
    is_ours = kind.__module__.startswith("parallelformers_ng.") and kind.__str__ is not object.__str__
    return str(value) if is_ours else kind.__name__


def read(answers: Answers) -> tuple[list[Any], WorkerError | None]:
    """Decode the answers. If ranks raised exceptions, also return the exception that explains the failure best."""
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
    # Prefer an exception that no aborted collective has caused, then the lowest rank.
    return values, broken[0] if broken else errors[min(raised, key=lambda rank: (raised[rank].aborted, rank))]
