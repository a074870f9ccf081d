"""The exchanges of a rank with its peers, whatever carries the bytes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from parallelformers_ng.collectives.arena import CANCEL_WORD, Arena
from parallelformers_ng.errors import CollectiveAbortedError

YIELD_SECONDS, LONGEST_SLEEP_SECONDS = 2e-3, 0.5e-3


class Communicator(ABC):
    """One rank's end of a group. All ranks make the same calls in the same order, each from one thread at a time.

    No collective is differentiable. If a rank leaves a collective by an exception, its peers wait until someone calls
    `abort`: the rank itself, or the parent through its Arena.

    Attributes:
        rank: this rank, 0 to `world_size` - 1.
        world_size: number of ranks.
        capturable: whether a CUDA graph may have its collectives in it.
        cancel_sequence: gives the sequence number that `Arena.request_cancel` was last called with, 0 if none. Ranks
            may see it at different times.
    """

    capturable = False
    cancel_sequence: Callable[[], int] = int

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._number = next(_numbers)
        _communicators[self._number] = self
        self._before_reset: list[Callable[[], None]] = []
        self._parts: dict[int, Communicator] = {}

    def within(self, width: int) -> Communicator:
        """Return the communicator for the ranks of this rank's stage: `width` adjacent ranks.

        All ranks call it together. One of a width is made once, and reset, aborted and closed with this one.
        """
        if width == self.world_size:
            return self
        if width not in self._parts:
            self._parts[width] = self._part(width)
        return self._parts[width]

    def before_reset(self, action: Callable[[], None]) -> None:
        """Have `action` called before the connections to the peers are closed: recorded collectives that use them must
        go first."""
        self._before_reset.append(action)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks; every rank gets the same bits. `torch.compile` passes through it.

        Args:
            tensor: tensor of one shape and dtype on all ranks. Summed in place if it is contiguous and needs no
                gradient. 16-bit floats are accumulated in fp32, but over NCCL in their own type; bools are or-ed.

        Returns:
            `tensor` where it was summed in place, else, as always in a trace, a new contiguous tensor without gradient.

        Raises:
            CollectiveAbortedError: a peer or the parent aborted, or a peer did not come within the timeout.
            DivergedError: the peers are in another collective, or in this one with another size.
        """
        if is_compiling():
            return torch.ops.parallelformers_ng.all_reduce(tensor, self._number)
        return self.sum(tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenates the ranks' tensors along `dim`, in rank order. `torch.compile` passes through it.

        Args:
            tensor: equal on all ranks in dtype and in every dimension but `dim`.
            dim: the dimension to concatenate along; negative counts from the end.
            sizes: contribution of each rank along `dim`, 0 allowed; None for equal ones.

        Returns:
            A new contiguous tensor, the same on all ranks, without gradient.

        Raises:
            ValueError: `sizes` does not fit the world size or `tensor`.
            CollectiveAbortedError, DivergedError: see `all_reduce`.
        """
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"all_gather: dim {dim} is out of range for a tensor of shape {tuple(tensor.shape)}")
        dim %= tensor.dim()
        own = tensor.shape[dim]
        sizes = [own] * self.world_size if sizes is None else list(sizes)
        if is_compiling():
            return torch.ops.parallelformers_ng.all_gather(tensor, self._number, dim, sizes)
        if len(sizes) != self.world_size or min(sizes) < 0 or sizes[self.rank] != own:
            raise ValueError(
                f"all_gather: sizes {sizes} do not fit rank {self.rank} of {self.world_size}, whose tensor has "
                f"shape {tuple(tensor.shape)}: one size per rank is needed, and sizes[{self.rank}] == shape[{dim}]"
            )
        return self.gather(tensor, dim, sizes)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrites `tensor` (one shape and dtype on all ranks) by that of rank `src`, and returns it: it is a gather
        to which `src` alone contributes.

        Raises:
            ValueError: there is no rank `src`.
            CollectiveAbortedError, DivergedError: see `all_reduce`.
        """
        if not 0 <= src < self.world_size:
            raise ValueError(f"broadcast: src {src} is not between 0 and world_size - 1 = {self.world_size - 1}")
        sizes = [tensor.numel() if rank == src else 0 for rank in range(self.world_size)]
        part = tensor.detach().reshape(-1)[: sizes[self.rank]]
        tensor.detach().copy_(self.all_gather(part, 0, sizes).view(tensor.shape))
        return tensor

    def why_void(self) -> CollectiveAbortedError | None:
        """Return the reason of an abort after which this rank's collectives end without an error: on a device.
        Results since then mean nothing, and errors since then may be consequences."""
        return None

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Around the launch of recorded collectives: meanwhile their connections stay.

        Raises:
            CollectiveAbortedError: they do not.
        """
        yield

    def note_end(self, sequence: int) -> None:
        """Note that this rank is done with a request, after which no peer waits for it."""
        return None

    def all_ended(self, sequence: int) -> bool:
        """Wait a moment for the peers to end a request that has failed here.

        Returns:
            Whether all ended it after the same collectives: none waits for another, and nothing need be aborted.
        """
        return False

    def clear_up(self) -> None:
        """After a request that was aborted: let recorded collectives go, for which the abort may wait."""
        return None

    @abstractmethod
    def _part(self, width: int) -> Communicator:
        """Return a new one for `within`."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """`all_reduce` outside a trace."""

    @abstractmethod
    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        """`all_gather` outside a trace, of a `dim` counted from the front and a size for each rank."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Makes the peers' present and next collectives raise CollectiveAbortedError. May be called from any thread."""

    def reset(self) -> None:
        """Begins anew after an abort. Called by every rank, after the parent's `Arena.reset`, before a collective."""
        for part in self._parts.values():
            part.reset()

    def close(self) -> None:
        """Releases memory and connections; the communicator cannot be used afterwards. Idempotent."""
        for part in self._parts.values():
            part.close()


# What `torch.compile` passes through: operators of torch, opaque to it, that know a communicator by a number. Outside a
# trace the communicator does its work directly, which is several microseconds cheaper.

_numbers = itertools.count()
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


@torch.library.custom_op("parallelformers_ng::all_reduce", mutates_args=())
def _all_reduce(tensor: Tensor, communicator: int) -> Tensor:
    return _communicators[communicator].sum(tensor.clone(memory_format=torch.contiguous_format))


@_all_reduce.register_fake
def _(tensor: Tensor, communicator: int) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("parallelformers_ng::all_gather", mutates_args=())
def _all_gather(tensor: Tensor, communicator: int, dim: int, sizes: list[int]) -> Tensor:
    return _communicators[communicator].gather(tensor, dim, sizes)


@_all_gather.register_fake
def _(tensor: Tensor, communicator: int, dim: int, sizes: list[int]) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = sum(sizes)
    return tensor.new_empty(shape)


class ArenaCommunicator(Communicator):
    """A communicator of ranks that share an arena; its words carry aborts and cancellations.

    Args:
        arena: it belongs to the communicator of all its ranks, which closes it.
        place: this rank's among all of the arena; None if the communicator is that of all.
    """

    def __init__(self, rank: int, world_size: int, arena: Arena, place: int | None = None) -> None:
        super().__init__(rank, world_size)
        self._arena = arena
        self._place = rank if place is None else place
        self._owns_arena = place is None
        # Read at every token: no Python runs.
        self.cancel_sequence = functools.partial(arena.words.__getitem__, CANCEL_WORD)

    def abort(self, reason: str) -> None:
        self._arena.abort(reason, self._place)

    def close(self) -> None:
        super().close()
        if self._owns_arena:
            self._arena.close()


class SingleCommunicator(ArenaCommunicator):
    """The group of one rank: every collective is the identity."""

    capturable = True

    def __init__(self, arena: Arena) -> None:
        super().__init__(0, 1, arena)

    def _part(self, width: int) -> Communicator:
        raise ValueError(f"one rank has no stages of {width}")

    def sum(self, tensor: Tensor) -> Tensor:
        return summable_in_place(tensor)

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def give_way(waited: float) -> None:
    """Let a rank that has waited for `waited` seconds wait a little longer: at first it yields, later it sleeps an
    eighth of the time waited so far, so that it comes late by a small share."""
    if waited < YIELD_SECONDS:
        os.sched_yield()
    else:
        time.sleep(min(waited / 8, LONGEST_SLEEP_SECONDS))


def summable_in_place(tensor: Tensor) -> Tensor:
    """Return the tensor itself where it may be overwritten by the sum, else a contiguous copy.

    A tensor that needs a gradient may be saved for the backward pass and must keep its values.
    """
    if tensor.requires_grad or not tensor.is_contiguous():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Writes ((parts[0] + parts[1]) + parts[2]) + … into `out`, 16-bit floats by way of fp32, and returns `out`."""
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)
