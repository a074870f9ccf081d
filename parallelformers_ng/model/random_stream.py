"""The random numbers that calls of a model draw: each call a stream of its own, or the one that all follow."""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator

import torch

Stream = tuple[torch.Tensor, Callable[[torch.Tensor], object]]
"""The state of a random stream, and what takes its state afterwards."""


class RandomStream:
    """What calls without a seed of their own follow.

    Args:
        seed: begins a stream of the model's own; None: calls follow the caller's generator.
    """

    def __init__(self, seed: int | None) -> None:
        self._own = None if seed is None else torch.Generator().manual_seed(seed)
        self._follower = threading.RLock()  # of who draws from that stream, or from the caller's generator
        self._draws = itertools.count()

    @property
    def is_own(self) -> bool:
        """Whether the model has a stream of its own."""
        return self._own is not None

    @contextlib.contextmanager
    def of_call(self, seed: int | None) -> Iterator[Stream]:
        """The state that a call starts from, and what takes the state afterwards."""
        if seed is None and not self._follower.acquire(blocking=False):
            seed = self.draw_seed()  # from where the call began that follows the generator, this would draw the same
        if seed is not None:
            yield torch.Generator().manual_seed(seed).get_state(), lambda after: None
            return
        stream = self._own or torch.default_generator
        try:
            yield stream.get_state(), stream.set_state
        finally:
            self._follower.release()

    def draw_seed(self) -> int:
        """For a call beside others: each has its own, and the generator that they do not follow stays as it is."""
        state = (self._own or torch.default_generator).get_state()
        return zlib.crc32(state.numpy()) << 32 | next(self._draws)
