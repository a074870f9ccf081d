"""Records decode steps as CUDA graphs, manages the arguments of a step, and finds operators that cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Model argument → its number of dimensions, of which the first is the batch. Only these arguments can get more rows.
_DIMENSIONS = {"input_ids": 2, "attention_mask": 4, "position_ids": 2, "token_type_ids": 2}


class CudaRecorder:
    """Records CUDA graphs that share one memory pool.

    A graph has fixed addresses and control flow, so a replay uses the same memory and runs no Python.

    A graph reads buffers outside the pool, and the outputs of a graph are copied before the next graph runs. The graphs
    of a pool can therefore share intermediate memory and run in any order.

    A pool whose graphs were all destroyed accepts no new graph while any of its memory is in use
    (`create_or_incref_pool` of torch's CUDACachingAllocator.cpp). So a new pool replaces a pool whose last graph was
    destroyed.

    Args:
        device: CUDA device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = 0  # graphs in the pool, which is replaced after its last graph is destroyed

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run a step on the stream that records, so that libraries such as cuBLAS initialize themselves before."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return step()
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
        """Record a step as a CUDA graph, without computing the step. Return the output, which replays overwrite, and
        the graph.

        The caller must pass the graph to `destroy`.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local" applies the rules of capture only to this thread, because NCCL's watchdog queries events in
            # another thread. The outer context restores the caller's stream even if a failed capture does not.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            graph.reset()
            # Repair what a failed capture leaves: an unusable pool, and the device's random generator in capture mode.
            self._pool = torch.cuda.graph_pool_handle()
            generator = torch.cuda.default_generators[self._device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        self._graphs += 1
        return output, graph

    def milliseconds(self, graph: torch.cuda.CUDAGraph) -> float:
        """Replay a CUDA graph, wait for the device, and return how long the replay took on the device, in ms."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)

    def destroy(self, graph: torch.cuda.CUDAGraph) -> None:
        """Destroy a CUDA graph and free its memory at once, even if objects still refer to the graph. An NCCL
        communicator can end only after the graphs that contain its collectives."""
        graph.reset()
        self._graphs -= 1
        if self._graphs == 0:
            self._pool = torch.cuda.graph_pool_handle()


class Uncapturable(Exception):
    """A decode step cannot be recorded as a CUDA graph; the message is the reason."""


class StepArguments:
    """The keyword arguments of the model in one decode step.

    Args:
        arguments: tensors, the cache and plain values, with `input_ids` `[rows, 1]`; a value may be a dictionary of
            tensors. Other arguments raise Uncapturable.

    Attributes:
        given: the argument `arguments`.
        tensors: all tensors in `given`, in order.
    """

    def __init__(self, arguments: dict[str, Any], cache: Any) -> None:
        self.given = arguments
        self.rows = arguments["input_ids"].shape[0]
        self.tensors: list[Tensor] = []
        self._names: list[str] = []
        self._constants: list[Any] = []
        for name, value in arguments.items():
            for key, item in value.items() if isinstance(value, dict) else ((None, value),):
                constant = "cache" if item is cache else item
                if isinstance(item, Tensor):
                    self.tensors.append(item)
                    self._names.append(name)
                    constant = None
                elif not isinstance(constant, (bool, int, float, str, type(None))):
                    raise Uncapturable(f"the argument {name} of a step is a {type(item).__name__}")
                self._constants.append((name, key, constant))

    @cached_property
    def can_be_padded(self) -> bool:
        """Whether rows can be added to the tensors: the first dimension of every tensor must be known to be the
        batch."""
        return all(
            tensor.ndim == _DIMENSIONS.get(name) and len(tensor) in (1, self.rows)
            for name, tensor in zip(self._names, self.tensors, strict=True)
        )

    def key(self, width: int) -> tuple[Any, ...]:
        """Return a key that is equal for all steps that the same CUDA graph of `width` rows can compute."""
        shapes = (self._shape(tensor, width) for tensor in self.tensors)
        kinds = ((tensor.dtype, tensor.device) for tensor in self.tensors)
        return (*self._constants, *shapes, *kinds)

    def buffers(self, width: int) -> list[Tensor]:
        """Return contiguous input tensors for a CUDA graph, `[width, …]`: copies of the call's tensor arguments.

        Rows above those of the call are copies of the first row, because every row must have valid values. A tensor
        without a batch dimension keeps its shape.
        """
        buffers = []
        for tensor in self.tensors:
            shape = self._shape(tensor, width)
            filled = tensor if tensor.shape == shape else tensor[:1].expand(shape)
            buffers.append(filled.clone(memory_format=torch.contiguous_format))
        return buffers

    def with_tensors(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Return the step's arguments, with `tensors` in the place of the step's own tensors, in the same order."""
        remaining = iter(tensors)
        return tree_map_only(Tensor, lambda _: next(remaining), self.given)

    def _shape(self, tensor: Tensor, width: int) -> tuple[int, ...]:
        padded = self.can_be_padded and len(tensor) == self.rows
        return (width, *tensor.shape[1:]) if padded else tuple(tensor.shape)


class KeptAlive(TorchDispatchMode):
    """A dispatch mode that keeps tensors alive that a recorded step reads but does not make, because a CUDA graph has
    only their addresses.

    Attributes:
        tensors: address of a storage object → a tensor in the storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._made:
                self.tensors.setdefault(storage, tensor)
        output = func(*args, **(kwargs or {}))
        self._made.update(tensor.untyped_storage()._cdata for tensor in _tensors_in(output))
        self._made -= self.tensors.keys()
        return output


def _tensors_in(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class CaptureCheck(TorchDispatchMode):
    """A dispatch mode that finds operators that no CUDA graph can record: they wait for the device or copy from the
    host.

    A failed recording may damage the state of the device's allocator and generator, so the check comes before any
    recording.

    Attributes:
        found: description of the first such operator; "" if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode does not split composite operators into those that the check knows
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
    indices = [item for item in args[1] if item is not None] if packet in _INDEXING else []
    if any(item.dtype in (torch.bool, torch.uint8) for item in indices):
        return f"{packet} by a mask waits for the device"
    if any(item.device != args[0].device for item in indices):
        return f"{packet} by a tensor on the host copies the tensor to the device"
    if packet is _ops.lift_fresh and (output.ndim or output.device.type != "cpu"):
        # Only a scalar on the host becomes an argument of a kernel; other tensors must be copied to the device.
        return "a tensor is made of Python numbers"
    tensors = [item for item in (*args, output) if isinstance(item, torch.Tensor)]
    if packet in (_ops._to_copy, _ops.copy_) and len({tensor.device.type for tensor in tensors}) > 1:
        return f"{packet} copies between host and device"
    return ""
