"""Chooses the backend of a group's collectives, and connects a rank to the other ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import Communicator, SingleCommunicator
from parallelformers_ng.collectives.links import Links
from parallelformers_ng.collectives.nccl import NcclCommunicator
from parallelformers_ng.collectives.process_group import GlooCommunicator
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator, StagedCommunicator, is_built
from parallelformers_ng.collectives.spanning import SpanningNcclCommunicator
from parallelformers_ng.collectives.two_stage import TwoStageCommunicator
from parallelformers_ng.wire.signed import Session

BACKENDS = ("auto", "shared_memory", "gloo", "nccl")


def chosen_backend(backend: str, device_type: str) -> str:
    if backend != "auto":
        return backend
    if device_type == "cuda":
        return "nccl"
    return "shared_memory" if is_built() else "gloo"


def why_unserved(backend: str, device_type: str, device_ids: Sequence[int] | None) -> str:
    """Return why a backend cannot run collectives between ranks on such devices; "" if it can."""
    if backend not in BACKENDS:
        return f"backend is {backend!r}; it takes one of {', '.join(BACKENDS)}"
    backend = chosen_backend(backend, device_type)
    if (backend, device_type) in (("nccl", "cpu"), ("gloo", "cuda")):
        return (
            f"backend {backend!r} does not serve {device_type}; NCCL is for CUDA, gloo for the CPU, and shared memory"
            " for both"
        )
    if backend == "nccl" and not torch.distributed.is_nccl_available():
        return (
            f"torch {torch.__version__} was built without NCCL; pass backend='shared_memory', or install another torch"
        )
    ids = list(device_ids or ())
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL 2.30 and later read this variable
    if backend == "nccl" and len(set(ids)) < len(ids) and not may_share:
        return (
            f"device_ids {ids} name a device twice, but NCCL needs one device for each rank; pass"
            " backend='shared_memory' for several ranks on one device"
        )
    if backend == "shared_memory" and not is_built():
        return (
            "backend 'shared_memory' was not built, because there was no C compiler when parallelformers_ng was"
            " installed; install a C compiler and then parallelformers_ng again, or, on CPU, pass backend='gloo'"
        )
    return ""


def connect(
    backend: str,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    arena_fd: int,
    rendezvous: str | None,
    timeout: float,
    span: Mapping[str, Any] | None = None,
) -> Communicator:
    """Connect a rank to its group. With gloo or NCCL, the call waits until all ranks have connected.

    With NCCL, the call sets environment variables of NCCL and torch; see `nccl_defaults`.

    Args:
        arena_fd: file descriptor of the parent's Arena, for shared memory, aborts and cancellations.
        rendezvous: path from `rendezvous_path`, of the same file for all ranks; needed by gloo and NCCL.
        span: description of several hosts; None for one host. `number`: number of this host. `counts`: ranks of each
            host. `address`: address of this host for other hosts. `links`: number of another host → socket and keys;
            None except on the first rank of a host. The communicator closes the sockets.
    """
    arena = Arena(arena_fd, world_size)
    backend = chosen_backend(backend, device.type)
    if span is None or len(span["counts"]) == 1:
        return _connect_here(backend, rank, device, arena, rendezvous, timeout)
    on_host = chosen_backend("auto", "cpu") if backend == "nccl" else backend
    within = _connect_here(on_host, rank, torch.device("cpu"), arena, rendezvous, timeout)
    links = None
    if span["links"] is not None:
        peers = {host: (socket.socket(fileno=file.fd), Session(*keys)) for host, (file, *keys) in span["links"].items()}
        links = Links(span["number"], peers, arena, timeout)
    between = TwoStageCommunicator(within, span["number"], span["counts"], links)
    if backend == "nccl":
        return SpanningNcclCommunicator(between, rank, arena, span["address"], timeout, device)
    return between if device.type == "cpu" else StagedCommunicator(between)


def _connect_here(
    backend: str, rank: int, device: torch.device, arena: Arena, rendezvous: str | None, timeout: float
) -> Communicator:
    world_size = arena.world_size
    if world_size == 1:
        return SingleCommunicator(arena)
    if backend == "shared_memory":
        shared = SharedMemoryCommunicator(arena, rank, timeout)
        return shared if device.type == "cpu" else StagedCommunicator(shared)
    assert rendezvous is not None, f"backend {backend!r} needs a rendezvous path from the parent"
    store = torch.distributed.FileStore(rendezvous, world_size)
    if backend == "gloo":
        return GlooCommunicator(rank, world_size, store, timeout, arena)
    return NcclCommunicator(rank, world_size, store, timeout, arena, device=device)
