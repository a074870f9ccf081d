"""Which backend serves a group, and how a rank joins it."""

from __future__ import annotations

import torch

from parallelformers_ng.collectives.arena_map import ArenaMap
from parallelformers_ng.collectives.communicator import Communicator, SingleCommunicator
from parallelformers_ng.collectives.gloo import GlooCommunicator
from parallelformers_ng.collectives.nccl import NcclCommunicator
from parallelformers_ng.collectives.process_group import open_store
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator, available_kernels
from parallelformers_ng.collectives.staged import StagedCommunicator

BACKENDS = ("auto", "shared_memory", "gloo", "nccl")


def chosen_backend(backend: str, device_type: str) -> str:
    """The one of BACKENDS that "auto" stands for; any other stands for itself."""
    if backend != "auto":
        return backend
    on_cpu = "shared_memory" if available_kernels() else "gloo"
    return "nccl" if device_type == "cuda" else on_cpu


def why_unserved(backend: str, device_type: str) -> str:
    """Why a backend cannot serve devices of a type here; "" where it can."""
    backend = chosen_backend(backend, device_type)
    if device_type not in ("cpu", "cuda") or (backend, device_type) in (("nccl", "cpu"), ("gloo", "cuda")):
        return (
            f"backend {backend!r} does not serve {device_type}; NCCL is for CUDA, gloo for the CPU, and shared memory"
            " for both"
        )
    if backend == "nccl" and not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL; pass backend='shared_memory', or install another"
    if backend == "shared_memory" and not available_kernels():
        return "backend 'shared_memory' works here neither in C nor in Python; pass backend='gloo'"
    return ""


def connect(
    backend: str,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    arena_fd: int | None,
    rendezvous: str | None,
    timeout: float,
) -> Communicator:
    """Joins a group; returns when the backend is ready, which for gloo and NCCL means that all ranks have come.

    Args:
        backend: one of BACKENDS. "auto" is NCCL on CUDA; on the CPU shared memory, or gloo where neither the C nor
            the Python kernel works.
        rank, world_size: this rank and the number of ranks.
        device: where the tensors of the collectives live.
        arena_fd: the `fd` of the parent's Arena. Shared memory needs it; for the others it carries the abort and
            cancel words.
        rendezvous: a path from `rendezvous_path`, to the same file for all ranks. Gloo and NCCL need it.
        timeout: how long to wait for a peer, in seconds.

    Raises:
        ValueError: the backend is unknown, does not serve the device, or lacks what it needs.
        ProtocolError: `arena_fd` is no arena for `world_size` ranks.
        UnsupportedPlatformError: shared memory was asked for and does not work here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"connect: backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if not timeout > 0:
        raise ValueError(f"connect: timeout {timeout} s is not positive")
    backend = chosen_backend(backend, device.type)
    if reason := why_unserved(backend, device.type):
        raise ValueError(f"connect: {reason}")
    if world_size == 1:
        return SingleCommunicator(None if arena_fd is None else ArenaMap(arena_fd, 1))
    if backend == "shared_memory":
        if arena_fd is None:
            raise ValueError("connect: shared memory needs the arena's file descriptor, arena_fd is None")
        shared = SharedMemoryCommunicator(arena_fd, rank, world_size, timeout)
        return shared if device.type == "cpu" else StagedCommunicator(shared)
    if rendezvous is None:
        raise ValueError(f"connect: backend {backend!r} needs a rendezvous path: take one from rendezvous_path()")
    arena = None if arena_fd is None else ArenaMap(arena_fd, world_size)
    store = open_store(rendezvous, world_size)
    if backend == "gloo":
        return GlooCommunicator(rank, world_size, store, timeout, arena)
    return NcclCommunicator(rank, world_size, store, timeout, arena, device)
