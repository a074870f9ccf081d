"""Keeps ranks in step: all ranks draw the same random numbers, and `generate` stops at the same token on all ranks."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation import GenerationMode

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import DivergedError
from parallelformers_ng.generation.object_messages import TAKEN
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.runtime.limits import cancellation_error

_CANCELLED, _UPDATED = 1, 2


class LiveChanges:
    """Receives the changes that other threads of the caller make to a call's objects while the call runs."""

    def __init__(self, emit: Any, objects: ObjectState) -> None:
        self._emit, self._objects = emit, objects
        self.has_arrived: Callable[[], bool] = emit.has_update

    def take(self) -> None:
        self._objects.restore(self._emit.updates.pop(0), wins=True)
        self._emit(TAKEN)


class AgreedCriteria(StoppingCriteriaList):
    """Stopping criteria of one generation that give the same result on all ranks.

    After every token each rank sends three values to all ranks: a fingerprint of the tokens so far, whether the rank
    saw a cancellation, and which sequences the rank would end. A cancellation counts if any rank saw it, because ranks
    may see a cancellation at different times. All ranks end the sequences that rank 0 ends, because clocks may differ.

    On CUDA devices the host does not wait for the values of the ranks. If fingerprints differ or a rank saw a
    cancellation, all sequences end, and `check` then raises the error.

    Different devices may choose different tokens; see `devices_alike`. On such devices (`sends`) the ranks send their
    newest tokens instead of fingerprints, and continue with the tokens of rank 0.

    Args:
        criteria: stopping criteria of this rank: limits of length and time, end tokens, the caller's criteria.
        sequence: number of the request, by which the parent cancels it.
        live: changes by other threads of the caller, which all ranks apply after the same token.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        communicator: Communicator,
        sequence: int,
        sends: bool = False,
        live: LiveChanges | None = None,
    ) -> None:
        super().__init__(criteria)
        self._communicator = communicator
        self._sequence = sequence
        self._sends = sends
        self._live = live
        self._weights: torch.Tensor | None = None
        self._fingerprint: torch.Tensor | int = 0
        self._seen: torch.Tensor | None = None
        self._length = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which sequences end with the newest tokens, bool `[rows]`, the same on every rank."""
        ended = super().__call__(input_ids, scores, **kwargs)
        cancelled = self._communicator.cancel_sequence() == self._sequence
        has_update = self._live is not None and self._live.has_arrived()
        if self._communicator.world_size == 1:
            if cancelled:
                raise cancellation_error()
            self._take_update(has_update)
            return ended
        flags = cancelled * _CANCELLED + has_update * _UPDATED
        self._length = input_ids.shape[1]
        if input_ids.device.type == "cpu" and not self._sends:
            return self._agree_now(ended, input_ids, flags)
        rows = len(ended)
        mine = torch.empty(2 + rows + self._sends * input_ids[:, -1].numel(), dtype=torch.long, device=input_ids.device)
        mine[:1] = flags  # assigning to a slice fills it on the device; `mine[0] = …` would copy from the host
        mine[1:2] = 0 if self._sends else self._take_in(input_ids)
        mine[2 : 2 + rows] = ended
        if self._sends:
            mine[2 + rows :] = input_ids[:, -1].flatten()
        self._seen = self._communicator.all_gather(mine).view(-1, len(mine))
        if self._sends:
            input_ids[:, -1].copy_(self._seen[0, 2 + rows :].view_as(input_ids[:, -1]))
        if self._live is not None:
            self._take_update(bool((self._seen[:, 0] >= _UPDATED).all()))
        amiss = ((self._seen[:, 0] & _CANCELLED) | (self._seen[:, 1] ^ self._seen[0, 1])).any()
        return self._seen[0, 2 : 2 + rows].bool() | amiss

    def _agree_now(self, ended: torch.Tensor, input_ids: torch.Tensor, flags: int) -> torch.Tensor:
        # Python computes these few values, because an operator of torch takes longer on CPU.
        for row, token in enumerate(input_ids[:, -1].flatten().tolist()):
            self._fingerprint = (31 * self._fingerprint + (row + 1) * 1000003 * token) % (1 << 63)
        mine = [flags, self._fingerprint, *ended.tolist()]
        seen = self._communicator.all_gather(torch.tensor(mine)).view(-1, len(mine)).tolist()
        self._compare(seen)
        self._take_update(all(flags >= _UPDATED for flags, *_ in seen))
        return ended if seen[0] == mine else torch.tensor(seen[0][2:], dtype=torch.bool)

    def check(self) -> None:
        if self._seen is not None:
            self._compare(self._seen.tolist())

    def _compare(self, seen: list[list[int]]) -> None:
        if any(flags & _CANCELLED for flags, *_ in seen):
            raise cancellation_error()
        if any(fingerprint != seen[0][1] for _, fingerprint, *_ in seen):
            raise DivergedError(f"the ranks chose different tokens at length {self._length}; the answer was discarded")

    def _take_update(self, arrived_everywhere: bool) -> None:
        if arrived_everywhere and self._live is not None:
            self._live.take()

    def _take_in(self, input_ids: torch.Tensor) -> torch.Tensor:
        # Hash of all tokens so far: 31 · earlier hash + Σ (row + 1) · 1000003 · token, in int64 with overflow.
        newest = input_ids[:, -1].flatten()
        if self._weights is None or len(self._weights) != len(newest):
            self._weights = torch.arange(1, len(newest) + 1, device=newest.device) * 1000003
        self._fingerprint = (newest * self._weights).sum() + 31 * self._fingerprint
        return self._fingerprint


# Generation modes whose next step reads its tokens from the `input_ids` that the stopping criteria received.
_TOKEN_BY_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@contextlib.contextmanager
def agreed_criteria(
    models: Sequence[Any],
    communicator: Communicator,
    sequence: int,
    alike: bool = True,
    live: LiveChanges | None = None,
) -> Iterator[None]:
    unchecked: list[AgreedCriteria] = []

    def check() -> None:
        while unchecked:
            unchecked.pop().check()

    def join(model: Any, *args: Any, **kwargs: Any) -> AgreedCriteria:
        check()  # compares the last tokens of the request's earlier generation
        criteria = type(model)._get_stopping_criteria(model, *args, **kwargs)
        sends = not alike and kwargs["generation_config"].get_generation_mode() in _TOKEN_BY_TOKEN
        agreed = AgreedCriteria(criteria, communicator, sequence, sends, live)
        unchecked.append(agreed)
        return agreed

    for model in models:
        # `nn.Module.__setattr__` would record the assignment as a change of the model in each call.
        vars(model)["_get_stopping_criteria"] = functools.partial(join, model)
    try:
        yield
        check()
    finally:
        for model in models:
            del vars(model)["_get_stopping_criteria"]


def devices_alike(communicator: Communicator, device: torch.device) -> bool:
    """Whether the devices of all ranks compute and draw identical numbers. All ranks must call this together.

    CUDA devices must be of the same product, because the product decides which kernels run. The devices must also have
    the same number of multiprocessors, because random numbers depend on that number (`calc_execution_policy` in torch's
    DistributionTemplates.h).
    """
    if device.type == "cpu" or communicator.world_size == 1:
        return True
    properties = torch.cuda.get_device_properties(device)
    kind = (properties.multi_processor_count, properties.major, properties.minor, zlib.crc32(properties.name.encode()))
    kinds = communicator.all_gather(torch.tensor(kind, device=device)).view(-1, len(kind))
    return bool((kinds == kinds[0]).all())


# Functions of torch with which `generate` draws random numbers.
_DRAWING = ("multinomial", "rand_like")


@contextlib.contextmanager
def shared_draws(communicator: Communicator, alike: bool) -> Iterator[None]:
    """Make all ranks use rank 0's random numbers inside the `with` block, unless their devices are `alike`."""
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


class CallersRandomness:
    """Context in which every rank draws the same random numbers, from the state of the caller's generator.

    CPU ranks use the caller's state itself, so sampling chooses the same tokens as in the caller's process. CUDA
    generators use another algorithm, and are seeded from the caller's state. Each `with` block continues where the last
    block stopped.
    """

    def __init__(self, state: bytes, device: torch.device) -> None:
        self._before = state
        self._host = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        self._device = device
        self._of_device: Any = None
        if device.type == "cuda":
            torch.cuda.manual_seed(zlib.crc32(state))
            self._of_device = torch.cuda.get_rng_state(device)
        self._began_with = self._of_device

    def __enter__(self) -> CallersRandomness:
        torch.set_rng_state(self._host)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self._host = torch.get_rng_state()
        if self._of_device is not None:
            self._of_device = torch.cuda.get_rng_state(self._device)

    def moved(self) -> torch.Tensor | None:
        """Return the state of the CPU generator after the `with` blocks, or None if no number was drawn.

        If a CUDA rank drew a number, the state advances by one draw.
        """
        if self._began_with is not None and not torch.equal(self._began_with, self._of_device):
            with self:
                torch.rand(())
        return None if self._host.numpy().tobytes() == self._before else self._host  # ten times faster than torch.equal


class OwnStream(CallersRandomness):
    """Context in which a call of a batch draws the same random numbers, from its own seed, as if it ran alone."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(torch.Generator().manual_seed(seed).get_state().numpy().tobytes(), device)
