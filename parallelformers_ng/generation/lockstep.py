"""Keeps ranks together while they compute: all draw the same numbers, and `generate` stops at the same token on all."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import StoppingCriteriaList

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import DivergedError
from parallelformers_ng.runtime.cancellation import cancellation_error


class AgreedCriteria(StoppingCriteriaList):
    """All criteria of one generation: its limits of length and time, its end tokens, the caller's own.

    After every token the ranks tell each other a fingerprint of the tokens chosen so far, whether they saw a
    cancellation, and which sequences they would end. A rank may see a cancellation later than another, so all go by
    what any of them saw; and its clock may run ahead of another's, so all end the sequences that rank 0 ends.

    On devices none of this is waited for. There all sequences end where something is amiss, and `check` says what.

    Args:
        criteria: what ends a sequence on this rank.
        communicator: the ranks.
        sequence: number of the request, the one that the parent cancels.
    """

    def __init__(self, criteria: StoppingCriteriaList, communicator: Communicator, sequence: int) -> None:
        super().__init__(criteria)
        self._communicator = communicator
        self._sequence = sequence
        self._weights: torch.Tensor | None = None
        self._fingerprint: torch.Tensor | int = 0
        self._seen: torch.Tensor | None = None
        self._length = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Which sequences end with the tokens just chosen, bool `[rows]`, the same on every rank.

        Raises:
            RequestCancelledError, DivergedError: as `check`; on CPU ranks, at once.
        """
        ended = super().__call__(input_ids, scores, **kwargs)
        cancelled = self._communicator.cancel_sequence() == self._sequence
        if self._communicator.world_size == 1:
            if cancelled:
                raise cancellation_error()
            return ended
        mine = torch.empty(2 + len(ended), dtype=torch.long, device=input_ids.device)
        mine[:1] = cancelled  # a slice is filled with it; a single element would be copied from the host
        mine[1] = self._take_in(input_ids)
        mine[2:] = ended
        self._seen = self._communicator.all_gather(mine).view(-1, len(mine))
        self._length = input_ids.shape[-1]
        if mine.device.type == "cpu":
            self.check()
            return self._seen[0, 2:].bool()
        amiss = (self._seen[:, 0] | (self._seen[:, 1] ^ self._seen[0, 1])).any()
        return self._seen[0, 2:].bool() | amiss

    def check(self) -> None:
        """See that nothing was amiss with the last tokens.

        Raises:
            RequestCancelledError: the caller wishes no answer.
            DivergedError: the ranks chose different tokens.
        """
        if self._seen is None:
            return
        seen = self._seen[:, :2].tolist()
        if any(cancelled for cancelled, _ in seen):
            raise cancellation_error()
        if any(fingerprint != seen[0][1] for _, fingerprint in seen):
            raise DivergedError(f"the ranks chose different tokens at length {self._length}; the answer was discarded")

    def _take_in(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A number that differs, but for chance, where tokens differ, the newest or earlier ones: at each step 31 times
        what it was + Σ (row + 1) · 1000003 · token mod 2⁶³."""
        newest = input_ids[:, -1]
        if self._weights is None or len(self._weights) != len(newest):
            self._weights = torch.arange(1, len(newest) + 1, device=newest.device) * 1000003
        self._fingerprint = (newest * self._weights).sum() + 31 * self._fingerprint
        return self._fingerprint


@contextlib.contextmanager
def agreed_criteria(models: Sequence[Any], communicator: Communicator, sequence: int) -> Iterator[None]:
    """Within it, a `generate` of any of these models ends as all ranks agree.

    Args:
        models: those that have one, a model and what generates within it.
        communicator, sequence: as in `AgreedCriteria`.

    Raises:
        RequestCancelledError, DivergedError: as `AgreedCriteria.check`.
    """
    unchecked: list[AgreedCriteria] = []

    def check() -> None:
        while unchecked:
            unchecked.pop().check()

    def join(model: Any, *args: Any, **kwargs: Any) -> AgreedCriteria:
        check()  # of a generation before this one
        made = AgreedCriteria(type(model)._get_stopping_criteria(model, *args, **kwargs), communicator, sequence)
        unchecked.append(made)
        return made

    for model in models:
        model._get_stopping_criteria = functools.partial(join, model)
    try:
        yield
        check()
    finally:
        for model in models:
            del model._get_stopping_criteria


def _begin_stream(host: bytes, device: torch.device) -> torch.Tensor:
    """Seed the generator of a CUDA device, another algorithm, from the state of the host's. Returns its state."""
    torch.cuda.manual_seed(zlib.crc32(host))
    return torch.cuda.get_rng_state(device)


class OwnStream:
    """Within it, what is drawn comes from a stream that nobody else draws from, and goes on where it was left: the one
    that a call with that seed has alone, see `CallersRandomness`.

    Args:
        seed: where it begins.
        device: where the rank computes.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._host = torch.Generator().manual_seed(seed).get_state()
        self._of_device: torch.Tensor | None = None
        self._device = device
        if device.type == "cuda":
            self._of_device = _begin_stream(self._host.numpy().tobytes(), device)

    def __enter__(self) -> None:
        torch.set_rng_state(self._host)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)

    def __exit__(self, *_: object) -> None:
        self._host = torch.get_rng_state()
        if self._of_device is not None:
            self._of_device = torch.cuda.get_rng_state(self._device)


class CallersRandomness:
    """Within it, every rank draws from the caller's generator. All ranks draw the same.

    On CPU the state is the caller's own, so sampling gives the tokens of one process. A CUDA generator is another
    algorithm; there the stream is seeded from the caller's state, and the caller's generator moves on by one draw
    where the device drew.

    Args:
        state: of the caller's CPU generator, or None to leave all generators alone.
        device: where the rank computes.
    """

    def __init__(self, state: bytes | None, device: torch.device) -> None:
        self._before = state
        self._device = device
        self.moved: torch.Tensor | None = None
        """The generator's state at the end, where anything was drawn."""

    def __enter__(self) -> CallersRandomness:
        if self._before is not None:
            torch.set_rng_state(torch.frombuffer(bytearray(self._before), dtype=torch.uint8))
            if self._device.type == "cuda":
                self._cuda_before = _begin_stream(self._before, self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda" and not torch.equal(torch.cuda.get_rng_state(self._device), self._cuda_before):
            torch.rand(())
        after = torch.get_rng_state()
        if after.numpy().tobytes() != self._before:  # a tenth of what torch.equal takes
            self.moved = after
