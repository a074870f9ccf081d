"""What a rank can do together with its peers, whatever carries the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallelformers_ng.collectives.arena_map import ArenaMap


class Communicator(ABC):
    """One rank's end of a group. All ranks make the same calls in the same order, each from one thread at a time.

    No collective is differentiable. Where a rank leaves a collective by an exception, its peers are left waiting
    until someone calls `abort`: the rank itself, or the parent through its Arena.

    Attributes:
        rank: this rank, 0 to `world_size` - 1.
        world_size: number of ranks.
        traced_number: by which the operators of `traced.py` find it, None before it has one.
        capturable: whether a CUDA graph may have its collectives in it.
    """

    traced_number: int | None = None
    capturable = False

    def __init__(self, rank: int, world_size: int, arena: ArenaMap | None = None) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"{type(self).__name__}: rank {rank} is not between 0 and world_size - 1 = {world_size - 1}"
            )
        self.rank = rank
        self.world_size = world_size
        self._arena = arena
        self._before_reset: list[Callable[[], None]] = []

    def before_reset(self, action: Callable[[], None]) -> None:
        """Have `action` called before the connections to the peers are given up: whoever has recorded collectives lets
        go of them."""
        self._before_reset.append(action)

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks; every rank gets the same bits.

        Args:
            tensor: of one shape and dtype on all ranks. Summed in place where it is contiguous and needs no gradient.
                16-bit floats are accumulated in fp32; bools are or-ed.

        Returns:
            `tensor` where it was summed in place, else a new contiguous tensor without gradient.

        Raises:
            CollectiveAbortedError: a peer or the parent aborted, or a peer did not come within the timeout.
            DivergedError: the peers are in another collective, or in this one with another size.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenates the ranks' tensors along `dim`, in rank order.

        Args:
            tensor: equal on all ranks in dtype and in every dimension but `dim`.
            dim: the dimension to concatenate along; negative counts from the end.
            sizes: what each rank contributes along `dim`, 0 allowed; None where all contribute the same.

        Returns:
            A new contiguous tensor, the same on all ranks, without gradient.

        Raises:
            ValueError: `sizes` does not fit the world size or `tensor`.
            CollectiveAbortedError, DivergedError: as in `all_reduce`.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrites `tensor` (one shape and dtype on all ranks) by that of rank `src`, and returns it.

        Raises:
            ValueError: there is no rank `src`.
            CollectiveAbortedError, DivergedError: as in `all_reduce`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have called it. Raises as `all_reduce` does."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Makes the peers' present and next collectives raise CollectiveAbortedError. May be called from any thread."""

    @abstractmethod
    def reset(self) -> None:
        """Begins anew after an abort. Called by every rank, after the parent's `Arena.reset`, before a collective."""

    def cancel_sequence(self) -> int:
        """The sequence number last given to `Arena.request_cancel`, 0 if none. Ranks may see it at different times."""
        return 0 if self._arena is None else self._arena.cancel_sequence

    def close(self) -> None:
        """Gives back what the communicator holds; it cannot be used afterwards. Idempotent."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _gather_sizes(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None) -> tuple[int, list[int]]:
        """`dim` counted from the front, and what every rank contributes along it."""
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"all_gather: dim {dim} is out of range for a tensor of shape {tuple(tensor.shape)}")
        dim %= tensor.dim()
        own = tensor.shape[dim]
        if sizes is None:
            return dim, [own] * self.world_size
        if len(sizes) != self.world_size or min(sizes) < 0 or sizes[self.rank] != own:
            raise ValueError(
                f"all_gather: sizes {list(sizes)} do not fit rank {self.rank} of {self.world_size}, whose tensor has "
                f"shape {tuple(tensor.shape)}: one size per rank is needed, and sizes[{self.rank}] == shape[{dim}]"
            )
        return dim, list(sizes)

    def _check_src(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise ValueError(f"broadcast: src {src} is not between 0 and world_size - 1 = {self.world_size - 1}")


class SingleCommunicator(Communicator):
    """The group of one rank: every collective is the identity."""

    capturable = True

    def __init__(self, arena: ArenaMap | None = None) -> None:
        super().__init__(0, 1, arena)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return summable_in_place(tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        self._gather_sizes(tensor, dim, sizes)
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        self._check_src(src)
        return tensor

    def barrier(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def reset(self) -> None:
        pass


def summable_in_place(tensor: Tensor) -> Tensor:
    """The tensor itself where it may be overwritten by the sum, else a contiguous copy.

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
