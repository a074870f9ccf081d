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
from transformers.generation import GenerationMode

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import DivergedError
from parallelformers_ng.runtime.cancellation import cancellation_error


class AgreedCriteria(StoppingCriteriaList):
    """All criteria of one generation: its limits of length and time, its end tokens, the caller's own.

    After every token the ranks tell each other a fingerprint of the tokens chosen so far, whether they saw a
    cancellation, and which sequences they would end. A rank may see a cancellation later than another, so all go by
    what any of them saw; and its clock may run ahead of another's, so all end the sequences that rank 0 ends.

    On devices none of this is waited for. There all sequences end where something is amiss, and `check` says what.

    Unlike devices choose unlike tokens, see `devices_alike`. On these the ranks send each other the tokens themselves,
    and all go on with those of rank 0.

    Args:
        criteria: stopping criteria of this rank.
        communicator: the ranks.
        sequence: number of the request, the one that the parent cancels.
        sends: whether tokens are sent and not compared. They are the last column of what the criteria are given.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, communicator: Communicator, sequence: int, sends: bool = False
    ) -> None:
        super().__init__(criteria)
        self._communicator = communicator
        self._sequence = sequence
        self._sends = sends
        self._weights: torch.Tensor | None = None
        self._fingerprint: torch.Tensor | int = 0
        self._seen: torch.Tensor | None = None
        self._length = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which sequences end with the newest tokens, bool `[rows]`, the same on every rank.

        Raises:
            RequestCancelledError, DivergedError: see `check`; on CPU ranks, at
                once.
        """
        ended = super().__call__(input_ids, scores, **kwargs)
        cancelled = self._communicator.cancel_sequence() == self._sequence
        if self._communicator.world_size == 1:
            if cancelled:
                raise cancellation_error()
            return ended
        rows = len(ended)
        mine = torch.empty(2 + rows * (1 + self._sends), dtype=torch.long, device=input_ids.device)
        mine[:1] = cancelled  # a slice is filled with it; a single element would be copied from the host
        mine[1:2] = 0 if self._sends else self._take_in(input_ids)
        mine[2 : 2 + rows] = ended
        if self._sends:
            mine[2 + rows :] = input_ids[:, -1]
        self._seen = self._communicator.all_gather(mine).view(-1, len(mine))
        self._length = input_ids.shape[-1]
        if self._sends:
            input_ids[:, -1].copy_(self._seen[0, 2 + rows :])
        if mine.device.type == "cpu":
            self.check()
            return self._seen[0, 2 : 2 + rows].bool()
        amiss = (self._seen[:, 0] | (self._seen[:, 1] ^ self._seen[0, 1])).any()
        return self._seen[0, 2 : 2 + rows].bool() | amiss

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
        """Return a number that differs, but for chance, where tokens differ, the newest or earlier ones: at each
        step 31 times what it was + Σ (row + 1) · 1000003 · token mod 2⁶³."""
        newest = input_ids[:, -1]
        if self._weights is None or len(self._weights) != len(newest):
            self._weights = torch.arange(1, len(newest) + 1, device=newest.device) * 1000003
        self._fingerprint = (newest * self._weights).sum() + 31 * self._fingerprint
        return self._fingerprint


_TOKEN_BY_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Ways to generate whose criteria are given the tokens that the next step reads."""


@contextlib.contextmanager
def agreed_criteria(
    models: Sequence[Any], communicator: Communicator, sequence: int, alike: bool = True
) -> Iterator[None]:
    """Within it, a `generate` of any of these models ends as all ranks agree.

    Args:
        models: models with a `generate`: the model and its parts.
        communicator, sequence: same as in `AgreedCriteria`.
        alike: whether the ranks' devices compute alike.

    Raises:
        RequestCancelledError, DivergedError: see `AgreedCriteria.check`.
    """
    unchecked: list[AgreedCriteria] = []

    def check() -> None:
        while unchecked:
            unchecked.pop().check()

    def join(model: Any, *args: Any, **kwargs: Any) -> AgreedCriteria:
        check()  # of a generation before this one
        criteria = type(model)._get_stopping_criteria(model, *args, **kwargs)
        sends = not alike and kwargs["generation_config"].get_generation_mode() in _TOKEN_BY_TOKEN
        agreed = AgreedCriteria(criteria, communicator, sequence, sends)
        unchecked.append(agreed)
        return agreed

    for model in models:
        model._get_stopping_criteria = functools.partial(join, model)
    try:
        yield
        check()
    finally:
        for model in models:
            del model._get_stopping_criteria


def devices_alike(communicator: Communicator, device: torch.device) -> bool:
    """Return whether the devices of all ranks compute and draw alike. All ranks call it together.

    On CUDA they do not if the devices differ in their multiprocessors, over which a kernel lays out its draws
    (`calc_execution_policy` in torch's DistributionTemplates.h). Nor if the devices differ in kind, as the kind decides
    the kernels.
    """
    if device.type == "cpu" or communicator.world_size == 1:
        return True
    properties = torch.cuda.get_device_properties(device)
    kind = (properties.multi_processor_count, properties.major, properties.minor, zlib.crc32(properties.name.encode()))
    kinds = communicator.all_gather(torch.tensor(kind, device=device)).view(-1, len(kind))
    return bool((kinds == kinds[0]).all())


_DRAWING = ("multinomial", "rand_like")
"""What of torch the loops of `generate` draw with."""


@contextlib.contextmanager
def shared_draws(communicator: Communicator, alike: bool) -> Iterator[None]:
    """Within it, ranks whose devices are unlike go on with what rank 0 draws for the choice of tokens.

    Args:
        alike: see `devices_alike`.
    """
    usual = {} if alike else {name: getattr(torch, name) for name in _DRAWING}

    def shared(draw: Any) -> Any:
        @functools.wraps(draw)
        def drawn(*args: Any, **kwargs: Any) -> torch.Tensor:
            return communicator.broadcast(draw(*args, **kwargs))

        return drawn

    try:
        for name, draw in usual.items():
            setattr(torch, name, shared(draw))
        yield
    finally:
        for name, draw in usual.items():
            setattr(torch, name, draw)


def _begin_stream(host: bytes, device: torch.device) -> torch.Tensor:
    """Seed the generator of a CUDA device, another algorithm, from the state of the host's. Returns its state."""
    torch.cuda.manual_seed(zlib.crc32(host))
    return torch.cuda.get_rng_state(device)


class OwnStream:
    """Within it, what is drawn comes from a stream that nobody else draws from, and goes on where it was left: the one
    that a call with that seed has alone, see `CallersRandomness`.

    Args:
        seed: start of the stream.
        device: device of the rank.
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
        state: state of the caller's CPU generator, or None to leave all generators alone.
        device: device of the rank.
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
