"""Defines the interface of collectives between ranks, independent of the backend."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from parallelformers_ng.collectives.arena import CANCEL_WORD, Arena
from parallelformers_ng.errors import CollectiveAbortedError


class Communicator(ABC):
    """One rank's connection to the other ranks of its group.

    All ranks must make the same calls in the same order. A rank must not make two calls at a time from different
    threads. No collective is differentiable. If a collective raises an exception on one rank, the other ranks wait
    until that rank calls `abort` or the parent calls `Arena.abort`.

    Attributes:
        capturable: whether a CUDA graph can contain collectives of this communicator.
        cancel_sequence: function that returns the sequence number from the last call of `Arena.request_cancel`, or 0.
            Ranks may see a new number at different times.
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
        """Return a communicator for this rank's pipeline stage, which has `width` adjacent ranks.

        All ranks must call this method together. Calls with the same width return the same object, which is reset,
        aborted and closed together with this communicator.

        Args:
            width: number of ranks of each stage; must divide the number of ranks of each host.
        """
        if width == self.world_size:
            return self
        if width not in self._parts:
            self._parts[width] = self._part(width)
        return self._parts[width]

    def before_reset(self, action: Callable[[], None]) -> None:
        """Register a function that runs before the connections to the other ranks are closed.

        CUDA graphs that contain collectives must be destroyed first. A `ProcessGroupCommunicator` calls the function in
        `clear_up`, `reset` and `close`. Other communicators never call it.
        """
        self._before_reset.append(action)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks; every rank gets the same bits. `torch.compile` can trace this call.

        Args:
            tensor: tensor of the same shape and dtype on all ranks. A contiguous tensor that needs no gradient is
                summed in place. 16-bit floats are accumulated in fp32, but with NCCL in 16 bits. For bools, the sum is
                a logical or.

        Returns:
            `tensor` if it was summed in place; otherwise, and always inside a `torch.compile` trace, a new contiguous
                tensor without gradient.
        """
        if is_compiling():
            return torch.ops.parallelformers_ng.all_reduce(tensor, self._number)
        return self.sum(tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order. `torch.compile` can trace this call.

        Args:
            sizes: size of each rank's tensor along `dim`, 0 allowed; None for equal sizes.

        Returns:
            A new contiguous tensor, the same on all ranks, without gradient.
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
        """Overwrite `tensor` with the tensor of rank `src`, by a gather in which only `src` sends data."""
        if not 0 <= src < self.world_size:
            raise ValueError(f"broadcast: src {src} is not between 0 and world_size - 1 = {self.world_size - 1}")
        sizes = [tensor.numel() if rank == src else 0 for rank in range(self.world_size)]
        part = tensor.detach().reshape(-1)[: sizes[self.rank]]
        tensor.detach().copy_(self.all_gather(part, 0, sizes).view(tensor.shape))
        return tensor

    def why_void(self) -> CollectiveAbortedError | None:
        """Return the error of an abort that made this rank's results on a device wrong; None without an abort.

        An abort ends the collectives that run on a device, but the device reports no error.
        """
        return None

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        yield

    def note_end(self, sequence: int) -> None:
        """Record that this rank has ended a request; `all_ended` of the other ranks reads the record."""
        return None

    def all_ended(self, sequence: int) -> bool:
        """After a request has failed on this rank, wait a short time until all ranks have ended the request.

        Only NCCL's communicator waits, at most 0.1 s. Every other communicator returns False at once.

        Returns:
            Whether all ranks ended the request after the same collectives. Then no rank waits, and no abort is needed.
        """
        return False

    def clear_up(self) -> None:
        """Destroy CUDA graphs with collectives after an abort, because the abort waits until the graphs are gone."""
        return None

    def _part(self, width: int) -> Communicator:
        raise ValueError(f"{self.world_size} ranks cannot be divided into stages of {width} ranks")

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor: ...

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make the other ranks' current and later collectives raise CollectiveAbortedError, from any thread."""

    def reset(self) -> None:
        """Prepare for new collectives after an abort. Every rank must call this after the parent's `Arena.reset`."""
        for part in self._parts.values():
            part.reset()

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


# `torch.compile` cannot trace a collective, so a trace calls these two operators. An operator takes no Python object,
# so its argument `communicator` is a number. Outside a trace, a direct call saves several microseconds.

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
    """A communicator of ranks that share an arena, through which they see aborts and cancellations.

    Args:
        place: number of this rank among all ranks of the arena, for the communicator of a pipeline stage; None for a
            communicator of all ranks.
    """

    def __init__(self, rank: int, world_size: int, arena: Arena, place: int | None = None) -> None:
        super().__init__(rank, world_size)
        self._arena = arena
        self._place = rank if place is None else place
        self._owns_arena = place is None
        # The worker calls this function for every token, so it runs no Python code.
        self.cancel_sequence = functools.partial(arena.words.__getitem__, CANCEL_WORD)

    def abort(self, reason: str) -> None:
        self._arena.abort(reason, self._place)

    def close(self) -> None:
        super().close()
        if self._owns_arena:
            self._arena.close()


class SingleCommunicator(ArenaCommunicator):
    capturable = True

    def __init__(self, arena: Arena) -> None:
        super().__init__(0, 1, arena)

    def sum(self, tensor: Tensor) -> Tensor:
        return summable(tensor)

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def summable(tensor: Tensor) -> Tensor:
    """Return the tensor itself if a sum may overwrite it; otherwise a contiguous copy.

    A tensor that requires a gradient is copied, because the backward pass may need its values.
    """
    if tensor.requires_grad or not tensor.is_contiguous():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write ((parts[0] + parts[1]) + parts[2]) + … to `out`, and return `out`. The fixed order gives all ranks the same
    bits."""
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)
