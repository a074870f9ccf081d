"""Runs collectives over NCCL between ranks of several hosts, on one network interface."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.nccl import NcclCommunicator
from parallelformers_ng.errors import CollectiveAbortedError, StartupError

_SLOT_BYTES = 256  # a length byte and NCCL's unique id of 128 bytes need 129
_SIOCGIFADDR = 0x8915


class HandedOver(dist.Store):
    """A `torch.distributed` store that sends NCCL's unique id from rank `source` to all ranks, by an all-gather.

    When torch connects an NCCL group, its first rank sets a unique id, and the other ranks get it. The store supports
    only this. A value has at most 255 bytes. The id is sent over signed connections. `set` and `get` raise the errors
    of `Communicator.all_gather`.
    """

    def __init__(self, between: Communicator, source: int) -> None:
        super().__init__()
        self._between = between
        self._source = source

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the stub says str
        # Only this key has NCCL's id. torch's watchdogs report errors by other keys, but `abort` reports them already.
        if "/" in key and ":" not in key:
            self._exchange(value)

    def get(self, key: str) -> bytes:
        return self._exchange(b"")

    def check(self, keys: Sequence[str]) -> bool:
        return False

    def _exchange(self, own: bytes) -> bytes:
        slot = torch.zeros(1, _SLOT_BYTES, dtype=torch.uint8)
        slot[0, : len(own) + 1] = torch.tensor([len(own), *own], dtype=torch.uint8)
        size, *parts = self._between.all_gather(slot, 0)[self._source].tolist()
        return bytes(parts[:size])


class SpanningNcclCommunicator(NcclCommunicator):
    """A communicator over NCCL for the CUDA ranks of several hosts. Unmeasured: never run on a GPU.

    The constructor sets the environment variables `TORCH_NCCL_RANKS_PER_ROOT` and, if the user has not set it,
    `NCCL_SOCKET_IFNAME`.

    Args:
        address: address at which other hosts reach this host. NCCL uses only the interface with this address, unless
            the user has set `NCCL_SOCKET_IFNAME`.
    """

    def __init__(
        self, between: Communicator, place: int, arena: Arena, address: str, timeout: float, device: torch.device
    ) -> None:
        self._between = between
        if "NCCL_SOCKET_IFNAME" not in os.environ:
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(address)}"
        os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(between.world_size)  # all ranks then share one unique id
        membership = between.rank, between.world_size, HandedOver(between, 0), timeout, arena, place
        super().__init__(*membership, device=device, is_on_one_host=False)

    def _of_part(self, width: int) -> tuple[int, int, dist.Store, float, Arena, int]:
        rank, _, _, timeout, arena, _ = super()._of_part(width)
        return rank, width, HandedOver(self._between, self.rank - rank), timeout, arena, self._place

    @contextlib.contextmanager
    def _queueing(self, kind: int) -> Iterator[None]:
        """Abort the group if NCCL raises an error in the `with` block; often another host has aborted before."""
        try:
            with super()._queueing(kind):
                yield
        except dist.DistBackendError as error:
            reason = f"rank {self.rank}: NCCL failed: {error}"
            self.abort(reason)
            raise CollectiveAbortedError(reason) from error

    def reset(self) -> None:
        self._between.reset()
        super().reset()

    def close(self) -> None:
        super().close()
        self._between.close()


def interface_of(address: str) -> str:
    interface = _find_6(address) if ":" in address else _find_4(address)
    if interface is None:
        raise StartupError(
            f"no network interface of this machine has the address {address}, which NCCL should use; set"
            " NCCL_SOCKET_IFNAME to the interface at which the other hosts reach this machine"
        )
    return interface


def _find_4(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an IPv4 address has no answer
                continue
            if answer[20:24] == socket.inet_aton(address):
                return name
    return None


def _find_6(address: str) -> str | None:
    digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with open("/proc/net/if_inet6") as lines:
        return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
