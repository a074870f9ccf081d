"""Records a decode step as a CUDA graph and runs it again; also the arguments of a step, and the parts that cannot
be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_DIMENSIONS = {"input_ids": 2, "attention_mask": 4, "position_ids": 2, "token_type_ids": 2}
"""Arguments whose first dimension is the rows, with their number of dimensions."""


class CudaRecorder:
    """CUDA graphs in one memory pool: addresses and control flow are frozen, so that a step runs again on the same
    memory, without any Python. Never run on a GPU: unmeasured.

    A graph reads buffers outside the pool and its outputs are copied before the next one runs, so that graphs may share
    their intermediate memory in whatever order they run.

    A pool without graphs takes no more of them as long as anything of it is in use (`create_or_incref_pool` of torch's
    CUDACachingAllocator.cpp), so that each time the last graph goes, so does the pool.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = 0  # of that pool

    def warm_up(self, step: Callable[[], Any]) -> Any:
        """Run a step where it will be recorded, so that libraries make ready what they need there."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return step()
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
        """Record a step. Nothing is computed yet.

        Returns:
            What the step returned, whose tensors each replay writes; and the graph, which is to be given to `destroy`.

        Raises:
            Exception: something in the step cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread is bound by the rules of capture: NCCL's watchdog asks for events in another. The outer
            # context goes back to the caller's stream even if a failed capture does not.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            graph.reset()
            self._start_afresh()
            raise
        self._graphs += 1
        return output, graph

    def milliseconds(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the device's time of one replay. Waits for the device."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)

    def destroy(self, graph: torch.cuda.CUDAGraph) -> None:
        """Destroy a graph now, whoever refers to it: NCCL waits for that, and its memory is kept for it until then."""
        graph.reset()
        self._graphs -= 1
        if self._graphs == 0:
            self._pool = torch.cuda.graph_pool_handle()

    def _start_afresh(self) -> None:
        """A capture that failed leaves its pool and the device's generator as if it still went on."""
        self._pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[self._device.index]
        generator.graphsafe_set_state(generator.clone_state())


class Uncapturable(Exception):
    """Why a step is not recorded, in words."""


class StepArguments:
    """The keyword arguments of one step.

    Args:
        arguments: `input_ids` `[rows, 1]` among them; tensors may lie in dictionaries.
        cache: the cache among them.

    Attributes:
        tensors: all tensors, in order.
        rows: sequences in the batch.

    Raises:
        Uncapturable: there is an argument that is neither a tensor nor a plain value.
    """

    def __init__(self, arguments: dict[str, Any], cache: Any) -> None:
        self.given = arguments
        self.rows = arguments["input_ids"].shape[0]
        self.tensors: list[Tensor] = []
        self._names: list[str] = []
        self._constants: list[Any] = []
        for name, value in arguments.items():
            for key, item in value.items() if isinstance(value, dict) else ((None, value),):
                if isinstance(item, Tensor):
                    self.tensors.append(item)
                    self._names.append(name)
                elif item is cache or item is None or isinstance(item, (bool, int, float, str)):
                    item = "cache" if item is cache else item
                else:
                    raise Uncapturable(f"a step is given {name}, a {type(item).__name__}")
                self._constants.append((name, key, None if isinstance(item, Tensor) else item))

    @cached_property
    def can_be_padded(self) -> bool:
        """Whether it is known of every tensor which of its dimensions is that of the rows."""
        return all(
            tensor.ndim == _DIMENSIONS.get(name) and len(tensor) in (1, self.rows)
            for name, tensor in zip(self._names, self.tensors, strict=True)
        )

    def key(self, width: int) -> tuple[Any, ...]:
        """Equal for two steps that one recording of `width` rows can serve."""
        shapes = (self._shape(tensor, width) for tensor in self.tensors)
        kinds = ((tensor.dtype, tensor.device) for tensor in self.tensors)
        return (*self._constants, *shapes, *kinds)

    def buffers(self, width: int) -> list[Tensor]:
        """Return the tensors of `width` rows for these arguments. What is added to theirs is the first row: valid,
        whoever reads it."""
        buffers = []
        for tensor in self.tensors:
            shape = self._shape(tensor, width)
            filled = tensor if tensor.shape == shape else tensor[:1].expand(shape)
            buffers.append(filled.clone(memory_format=torch.contiguous_format))
        return buffers

    def with_tensors(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Return the arguments with other tensors in the places of these."""
        rest = iter(tensors)

        def placed(item: Any) -> Any:
            return next(rest) if isinstance(item, Tensor) else item

        return {
            name: {key: placed(item) for key, item in value.items()} if isinstance(value, dict) else placed(value)
            for name, value in self.given.items()
        }

    def _shape(self, tensor: Tensor, width: int) -> tuple[int, ...]:
        padded = self.can_be_padded and len(tensor) == self.rows
        return (width, *tensor.shape[1:]) if padded else tuple(tensor.shape)


class KeptAlive(TorchDispatchMode):
    """Keeps the tensors that the operators within it are given and did not make: a graph has their addresses alone.

    Attributes:
        tensors: storage → one of the tensors that lie in it.
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
    """Looks at the operators of a step for one that waits for the device, or takes numbers from the host.

    A capture would fail there, and a failed capture may leave the device's allocator and generator in disorder, so it
    is better not tried.

    Attributes:
        found: the first such operator, in words; "" if there is none.
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
    indices = [item for item in args[1] if item is not None] if packet in _INDEXING else []
    if any(item.dtype in (torch.bool, torch.uint8) for item in indices):
        return f"{packet} by a mask waits for the device"
    if any(item.device != args[0].device for item in indices):
        return f"{packet} by a tensor of the host has it copied to the device"
    if packet is _ops.lift_fresh and (output.ndim or output.device.type != "cpu"):
        # a single number on the host is an argument like any other; all else has to be copied to the device
        return "a tensor is made of Python numbers"
    tensors = [item for item in (*args, output) if isinstance(item, torch.Tensor)]
    if packet in (_ops._to_copy, _ops.copy_) and len({tensor.device.type for tensor in tensors}) > 1:
        return f"{packet} goes from host to device or back"
    return ""
