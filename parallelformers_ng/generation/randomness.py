"""Draws on the workers as the caller's generator would have drawn them."""

from __future__ import annotations

import zlib
from types import TracebackType

import torch


class Randomness:
    """Within it, every rank draws from the caller's generator. All ranks draw the same.

    On CPU the state is the caller's own, so sampling gives the tokens of one process. A CUDA generator is another
    algorithm; there the stream is seeded from the caller's state, and the caller's generator moves on by one draw
    where the device drew.

    Args:
        state: the caller's CPU generator, a uint8 vector, or None to leave all generators alone.
        device: where the rank computes.
    """

    def __init__(self, state: torch.Tensor | None, device: torch.device) -> None:
        # A clone, since torch reads the state from the start of its storage, whatever offset the tensor has in it.
        self._before = None if state is None else state.clone()
        self._device = device
        self._after: torch.Tensor | None = None

    def __enter__(self) -> Randomness:
        if self._before is not None:
            torch.set_rng_state(self._before)
            if self._device.type == "cuda":
                torch.cuda.manual_seed(zlib.crc32(self._before.numpy().tobytes()))
                self._cuda_before = torch.cuda.get_rng_state(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda" and not torch.equal(torch.cuda.get_rng_state(self._device), self._cuda_before):
            torch.rand(())
        self._after = torch.get_rng_state()

    def moved(self) -> torch.Tensor | None:
        """The generator's state at the end, where anything was drawn."""
        if self._before is None or self._after is None or _same(self._before, self._after):
            return None
        return self._after


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """As `torch.equal`, which takes ten times as long for so few bytes."""
    return one.numpy().tobytes() == other.numpy().tobytes()
