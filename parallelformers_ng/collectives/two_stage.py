"""Collectives of ranks on several hosts: within each host as on one, then between one rank of each, then back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator, sum_in_rank_order, summable_in_place
from parallelformers_ng.collectives.links import Links


class TwoStageCommunicator(Communicator):
    """A rank on one of several hosts. The first rank of each host is its leader, and the only one that has `links`.

    A sum is taken over the ranks of each host, and of those sums in the order of the hosts: so every rank holds the
    same bits.

    Args:
        host: the communicator of this host's ranks.
        number: number of this host.
        counts: ranks of each host. Ranks are numbered host after host.
        links: the leader's; None on the others.
    """

    def __init__(self, host: Communicator, number: int, counts: Sequence[int], links: Links | None) -> None:
        super().__init__(sum(counts[:number]) + host.rank, sum(counts))
        self._within = host
        self._number = number
        self._counts = list(counts)
        self._links = links
        self.cancel_sequence = host.cancel_sequence

    def _part(self, width: int) -> Communicator:
        if any(count % width for count in self._counts):
            raise ValueError(f"stages of {width} ranks do not lie within hosts of {self._counts}")
        return self._within.within(width)  # which is reset and closed with the host's own

    def sum(self, tensor: Tensor) -> Tensor:
        out = self._within.sum(summable_in_place(tensor))
        if not out.numel():
            return out
        if self._links is not None:
            parts = self._exchanged(self._links, out, [out.numel()] * len(self._counts))
            sum_in_rank_order([part.view(out.shape) for part in parts], out=out)
        return self._spread(out)

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        ends = list(itertools.accumulate(self._counts, initial=0))
        of_hosts = [sizes[start:end] for start, end in itertools.pairwise(ends)]
        here = self._within.gather(tensor, dim, of_hosts[self._number])
        shape = list(here.shape)
        unit = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        lengths = [sum(of_host) for of_host in of_hosts]
        shape[dim] = sum(lengths)
        out = torch.empty(shape, dtype=here.dtype)
        if not out.numel():
            return out
        if self._links is not None:
            parts = self._exchanged(self._links, here, [length * unit for length in lengths])
            shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]
            torch.cat([part.view(of_host) for part, of_host in zip(parts, shapes, strict=True)], dim, out=out)
        return self._spread(out)

    def abort(self, reason: str) -> None:
        self._within.abort(reason)  # the agents of the hosts tell each other

    def reset(self) -> None:
        self._within.reset()
        if self._links is not None:
            self._links.reset()

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        self._within.close()

    def _spread(self, tensor: Tensor) -> Tensor:
        """Send the leader's tensor to all ranks of this host."""
        return tensor if self._within.world_size == 1 else self._within.broadcast(tensor)

    def _exchanged(self, links: Links, own: Tensor, counts: list[int]) -> list[Tensor]:
        """Return the tensors of all leaders, flat, of so many elements each."""
        size = own.element_size()
        try:
            parts = links.exchange(_bytes(own), [count * size for count in counts])
        except Exception as error:
            self.abort(str(error))
            raise
        return [_tensor(part, own.dtype) for part in parts]


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _tensor(data: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
