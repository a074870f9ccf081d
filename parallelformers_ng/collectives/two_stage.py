"""Runs collectives of ranks on several hosts: first within each host, then between leaders, then within each host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator, sum_in_rank_order, summable
from parallelformers_ng.collectives.links import Links


class TwoStageCommunicator(Communicator):
    """A communicator of ranks on several hosts. The first rank of each host is its leader, the only rank with links.

    Each host sums its own ranks, and the leaders sum these sums in the order of the hosts. So every rank gets the same
    bits. A sum of 16-bit floats is rounded to 16 bits on each host, and again over the hosts.
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
            raise ValueError(f"hosts of {self._counts} ranks cannot be divided into stages of {width} ranks")
        return self._within.within(width)  # a stage lies within a host, whose communicator also resets it

    def sum(self, tensor: Tensor) -> Tensor:
        out = self._within.sum(summable(tensor))
        if not out.numel():
            return out
        if self._links is not None:
            parts = self._exchanged(self._links, out, [out.numel()] * len(self._counts))
            sum_in_rank_order([part.view(out.shape) for part in parts], out=out)
        return self._spread(out)

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        ends = list(itertools.accumulate(self._counts, initial=0))
        host_sizes = [sizes[start:end] for start, end in itertools.pairwise(ends)]
        own = self._within.gather(tensor, dim, host_sizes[self._number])
        shape = list(own.shape)
        unit = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        lengths = [sum(of_host) for of_host in host_sizes]
        shape[dim] = sum(lengths)
        out = torch.empty(shape, dtype=own.dtype)
        if not out.numel():
            return out
        if self._links is not None:
            parts = self._exchanged(self._links, own, [length * unit for length in lengths])
            shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]
            torch.cat([part.view(of_host) for part, of_host in zip(parts, shapes, strict=True)], dim, out=out)
        return self._spread(out)

    def abort(self, reason: str) -> None:
        self._within.abort(reason)  # the agent of this host forwards the abort to the other hosts

    def reset(self) -> None:
        self._within.reset()
        if self._links is not None:
            self._links.reset()

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        self._within.close()

    def _spread(self, tensor: Tensor) -> Tensor:
        return tensor if self._within.world_size == 1 else self._within.broadcast(tensor)

    def _exchanged(self, links: Links, own: Tensor, counts: list[int]) -> list[Tensor]:
        flat: Any = own.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            parts = links.exchange(memoryview(flat), [count * own.element_size() for count in counts])
        except Exception as error:
            self.abort(str(error))
            raise
        return [torch.frombuffer(part, dtype=own.dtype) if len(part) else own.new_empty(0) for part in parts]
