"""What records a decode step and runs it again: a CUDA graph. And what in a step cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(Protocol):
    """Addresses and control flow of what is recorded are frozen: it runs on the same memory, without any Python."""

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run a step where it will be recorded, so that libraries make ready what they need there."""

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record a step. Nothing is computed yet.

        Returns:
            What the step returned, whose tensors each run writes; and what runs it.

        Raises:
            Exception: something in the step cannot be recorded.
        """


class CudaRecorder:
    """CUDA graphs in one memory pool. Never run on a GPU: unmeasured.

    A graph reads buffers outside the pool and its outputs are copied before the next one runs, so that graphs may share
    their intermediate memory in whatever order they run.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = step()
        current.wait_stream(self._stream)
        return output

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread is bound by the rules of capture: NCCL's watchdog asks for events in another. The outer
            # context goes back to the caller's stream also where a failed capture does not.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            self._start_afresh()
            raise
        return output, graph.replay

    def _start_afresh(self) -> None:
        """A capture that failed leaves its pool and the device's generator as if it still went on."""
        self._pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[self._device.index]
        generator.graphsafe_set_state(generator.clone_state())


class Watch(TorchDispatchMode):
    """Looks at the operators of a step for one that waits for the device, or takes numbers from the host.

    A capture would fail there, and a failed capture may leave the device's allocator and generator in disorder, so it
    is better not tried.

    Attributes:
        found: the first such operator, in words; "" where there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, operators made of others come as they are
            output = func.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
        output = func(*args, **kwargs)
        if not self.found:
            self.found = _obstacle(func, args, output)
        return output


_ops = torch.ops.aten
_WAITING = {
    _ops._local_scalar_dense, _ops.nonzero, _ops.nonzero_static, _ops.masked_select, _ops._unique2, _ops.unique_dim,
    _ops.unique_consecutive, _ops.repeat_interleave, _ops.bincount,
}  # fmt: skip
_INDEXING = {_ops.index, _ops.index_put, _ops.index_put_}


def _obstacle(func: Any, args: Sequence[Any], output: Any) -> str:
    packet = func.overloadpacket
    if packet in _WAITING:
        return f"{packet} waits for the device"
    if packet in _INDEXING and any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in args[1]):
        return f"{packet} by a mask waits for the device"
    if packet is _ops.lift_fresh and (output.ndim or output.device.type != "cpu"):
        # a single number on the host is an argument like any other; all else has to be copied to the device
        return "a tensor is made of Python numbers"
    tensors = [item for item in (*args, output) if isinstance(item, torch.Tensor)]
    if packet in (_ops._to_copy, _ops.copy_) and len({tensor.device.type for tensor in tensors}) > 1:
        return f"{packet} goes from host to device or back"
    return ""
