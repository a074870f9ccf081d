"""Replaces the names of `torch.cuda` that the package, transformers and torch itself use."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.pretend_cuda import graphs
from tests.pretend_cuda.graphs import CUDAGraph
from tests.pretend_cuda.ledger import WAITS, ledger
from tests.pretend_cuda.memory import key_of, memory
from tests.pretend_cuda.streams import Event, Stream, order
from tests.pretend_cuda.tensor import device_mode

DEVICES = 4
MEMORY = memory.limit
DRIVER = "PRETENDED_DRIVER"
"""Environment variable with the number of NVML's devices that CUDA has, or "old" for a driver without any."""


def _index(device: Any = None) -> int:
    if device is None:
        return device_mode.current
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return device_mode.current if index is None else index


@contextlib.contextmanager
def graph(
    graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    synchronize()
    empty_cache()
    with (
        stream or Stream(device_mode.current),
        graphs.capture(graph, pool or graphs.pool_handle(), device_mode.current),
    ):
        yield


_initialized = False


def lazy_init() -> None:
    global _initialized
    if os.environ.get(DRIVER) == "old":
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.\nHow")
    _initialized = True


def device_count() -> int:
    """Return NVML's number of devices until CUDA is initialized, then CUDA's number."""
    return int(os.environ.get(DRIVER, DEVICES)) if _initialized else DEVICES


def set_device(device: Any) -> None:
    lazy_init()
    if _index(device) >= device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal\nGPU device may be out of range")
    device_mode.current = _index(device)


@contextlib.contextmanager
def device_of(device: Any) -> Iterator[None]:
    before = device_mode.current
    device_mode.current = _index(device)
    try:
        yield
    finally:
        device_mode.current = before


def synchronize(device: Any = None) -> None:
    graphs.refuse()
    ledger.note(WAITS, "synchronize")
    if device_mode.broken:
        raise torch.AcceleratorError(device_mode.broken)
    order.host_waits()


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return device_mode.generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    device_mode.generator(_index(device)).set_state(state)


def manual_seed(seed: int) -> None:
    device_mode.generator(device_mode.current).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(DEVICES):
        device_mode.generator(index).manual_seed(seed)


def get_device_properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name="Pretended",
        major=9,
        minor=0,
        total_memory=memory.limit,
        multi_processor_count=device_mode.blocks(_index(device)),
        gcnArchName="",
    )


def empty_cache() -> None:
    memory.empty_cache(device_mode.current)
    emptied.append(memory.allocated(device_mode.current))


def record_stream(tensor: Any, stream: Stream) -> None:
    order.lend(key_of(tensor.host), stream)


def no_compiler(function: Any = None, **_: Any) -> Any:
    if "PRETENDED_COMPILER" not in os.environ:
        raise AssertionError("the compiler was asked for; it has no code for a pretended device")
    torch._dynamo.utils.counters["stats"]["unique_graphs"] += 1
    return function


emptied: list[int] = []
"""Bytes allocated at each call of `empty_cache`."""

STUBS: dict[str, Any] = {
    "_lazy_init": lazy_init,
    "is_available": lambda: True,
    "is_initialized": lambda: _initialized,
    "device_count": device_count,
    "current_device": lambda: device_mode.current,
    "set_device": set_device,
    "device": device_of,
    "synchronize": synchronize,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "graph_pool_handle": graphs.pool_handle,
    "default_generators": [types.SimpleNamespace(clone_state=str, graphsafe_set_state=str)] * DEVICES,
    "current_stream": lambda device=None: order.current,
    "default_stream": lambda device=None: order.default,
    "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda device=None: "Pretended",
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": get_device_properties,
    "can_device_access_peer": lambda device, peer: os.environ.get("PRETENDED_SMALL_SUMS") != "far",
    "is_bf16_supported": lambda *_, **__: True,
    "empty_cache": empty_cache,
    "ipc_collect": lambda: None,
    "mem_get_info": lambda device=None: (memory.limit - memory.reserved(_index(device)), memory.limit),
    "memory_allocated": lambda device=None: memory.allocated(_index(device)),
    "memory_reserved": lambda device=None: memory.reserved(_index(device)),
    "max_memory_allocated": lambda device=None: memory.reserved(_index(device)),
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_summary": lambda device=None, abbreviated=False: f"| PyTorch CUDA memory summary, device {device} |",
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed_all,
}


def install() -> None:
    """Replace names of `torch.cuda` by functions of the pretended devices, until this process ends."""
    for name, stub in STUBS.items():
        setattr(torch.cuda, name, stub)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes, which peft imports, reads the name
    torch.Event, torch.Stream = Event, Stream  # type: ignore[misc, assignment]
    torch.Tensor.record_stream = record_stream  # type: ignore[assignment, method-assign]
    torch.compile = no_compiler  # type: ignore[assignment]
