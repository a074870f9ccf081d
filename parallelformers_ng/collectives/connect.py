"""Chooses the backend of a group, and connects a rank."""

from __future__ import annotations

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
    """Return the one of BACKENDS that "auto" stands for; any other stands for itself."""
    if backend != "auto":
        return backend
    on_cpu = "shared_memory" if is_built() else "gloo"
    return "nccl" if device_type == "cuda" else on_cpu


def why_unserved(backend: str, device_type: str, device_ids: Sequence[int] | None) -> str:
    """Return why a backend cannot serve the devices of a type, "cpu" or "cuda", here; "" if it can."""
    if backend not in BACKENDS:
        return f"backend is {backend!r}; it takes one of {', '.join(BACKENDS)}"
    backend = chosen_backend(backend, device_type)
    if (backend, device_type) in (("nccl", "cpu"), ("gloo", "cuda")):
        return (
            f"backend {backend!r} does not serve {device_type}; NCCL is for CUDA, gloo for the CPU, and shared memory"
            " for both"
        )
    if backend == "nccl" and not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL; pass backend='shared_memory', or install another"
    if backend == "nccl" and device_ids is not None and len(set(device_ids)) < len(device_ids):
        return (
            f"device_ids {list(device_ids)} name a device twice, which NCCL does not take; pass"
            " backend='shared_memory' for ranks that share a device"
        )
    if backend == "shared_memory" and not is_built():
        return (
            "backend 'shared_memory' was not built, for want of a C compiler when parallelformers_ng was installed;"
            " install it again with one, or, on CPU, pass backend='gloo'"
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
    """Joins a group; returns when the backend is ready, which for gloo and NCCL means that all ranks have come.

    Args:
        backend: one of BACKENDS, one that serves `device` (`why_unserved`). "auto" is NCCL on CUDA; on the CPU shared
            memory, or gloo where its C was not built.
        rank, world_size: this rank and the number of ranks, of this host.
        device: device of the tensors.
        arena_fd: the `fd` of the parent's Arena, for shared memory, and for the abort and cancel words.
        rendezvous: a path from `rendezvous_path`, to the same file for all ranks. Gloo and NCCL need it.
        timeout: how long to wait for a peer, in seconds.
        span: places of the ranks on other hosts, if there are any: `number` of this host, `counts` of ranks per
            host, the `address` of this host for the others, and, for the first rank here, `links`: number of another
            host → socket, and keys of its connection there.
    """
    arena = Arena(arena_fd, world_size)
    backend = chosen_backend(backend, device.type)
    if span is None or len(span["counts"]) == 1:
        return _connect_here(backend, rank, device, arena, rendezvous, timeout)
    on_host = chosen_backend("auto", "cpu") if backend == "nccl" else backend
    within = _connect_here(on_host, rank, torch.device("cpu"), arena, rendezvous, timeout)
    links = None
    if span["links"] is not None:
        settings = {
            other: (socket.socket(fileno=file.fd), Session(*keys)) for other, (file, *keys) in span["links"].items()
        }
        links = Links(span["number"], settings, arena, timeout)
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
    assert rendezvous is not None, "the parent makes one for these backends"
    store = torch.distributed.FileStore(rendezvous, world_size)
    if backend == "gloo":
        return GlooCommunicator(rank, world_size, store, timeout, arena)
    return NcclCommunicator(rank, world_size, store, timeout, arena, device=device)
