"""What of `torch.cuda` the package, transformers and torch itself ask of a device."""

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
from tests.pretend_cuda.memory import memory
from tests.pretend_cuda.tensor import device_mode

DEVICES = 4
MEMORY = memory.limit
DRIVER = "PRETENDED_DRIVER"
"""The environment variable that has how many devices CUDA has of those that NVML lists, or "old", where it has none."""


def _index(device: Any = None) -> int:
    if device is None:
        return device_mode.current
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return device_mode.current if found is None else found


class Stream:
    """Work is done when it is queued, so that a stream has nothing to keep."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", _index(device))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        ledger.note(WAITS, "Stream.synchronize")

    def query(self) -> bool:
        return True


class Event:
    """An event in a stream. One that was never recorded is waited for by nobody."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True
        self._launched = ledger.launched

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.recorded:
            ledger.wait(self._launched)


@contextlib.contextmanager
def graph(
    graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    synchronize()
    empty_cache()
    with graphs.capture(graph, pool or graphs.pool_handle(), device_mode.current):
        yield


_initialized = False


def lazy_init() -> None:
    global _initialized
    if os.environ.get(DRIVER) == "old":
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.\nHow")
    _initialized = True


def device_count() -> int:
    """By NVML until CUDA is initialized, then by CUDA."""
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


def no_compiler(function: Any = None, **_: Any) -> Any:
    if "PRETENDED_COMPILER" not in os.environ:
        raise AssertionError("the compiler was asked for; it has no code for a pretended device")
    torch._dynamo.utils.counters["stats"]["unique_graphs"] += 1
    return function


emptied: list[int] = []
"""How many bytes were allocated whenever `empty_cache` was called."""

_stream = Stream(0)

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
    "current_stream": lambda device=None: _stream,
    "default_stream": lambda device=None: _stream,
    "set_stream": lambda stream: None,
    "stream": lambda stream: contextlib.nullcontext(),
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda device=None: "Pretended",
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": get_device_properties,
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


def stands_in(place: str) -> bool:
    """Whether a place of code, "torch.cuda:stream", holds a stub."""
    module, _, name = place.partition(":")
    return (module == "torch.cuda" and name.partition(".")[0] in STUBS) or place == "torch:compile"


def install() -> None:
    """Have `torch.cuda` speak of the pretended devices, for as long as this process lives."""
    for name, stub in STUBS.items():
        setattr(torch.cuda, name, stub)
    torch.Event, torch.Stream = Event, Stream  # type: ignore[misc, assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment, method-assign]
    torch.compile = no_compiler  # type: ignore[assignment]
