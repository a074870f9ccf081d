"""Defines tensors that claim to be on a CUDA device, and rules for operators on device and host tensors."""

from __future__ import annotations

import math
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.pretend_cuda import graphs
from tests.pretend_cuda.ledger import PAGEABLE, TO_DEVICE, TO_HOST, WAITS, ledger
from tests.pretend_cuda.memory import key_of, memory
from tests.pretend_cuda.operators import Operator, operator
from tests.pretend_cuda.streams import order

aten = torch.ops.aten

MULTIPROCESSORS = "PRETENDED_MULTIPROCESSORS"
"""Environment variable with the number of multiprocessors of each device, separated by commas."""
_BLOCK = 256  # threads per block
_MATH_ATTENTION = 0


class DeviceTensor(torch.Tensor):
    """A tensor on a device.

    Attributes:
        host: host tensor with the same memory.
    """

    host: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> DeviceTensor:
        if host.is_inference() == torch.is_inference_mode_enabled():
            self = cls._wrapped(host, device)
        else:
            with torch.inference_mode(host.is_inference()):  # a view is an inference tensor exactly if its base is
                self = cls._wrapped(host, device)
        self.host = host.detach() if host.requires_grad else host
        memory.take(self, self.host, device.index)
        return self

    @classmethod
    def _wrapped(cls, host: torch.Tensor, device: torch.device) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
            requires_grad=host.requires_grad,
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.host!r} on {self.device}"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy(force=True)
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy on the device, as `UntypedStorage.clone` does for `Tensor.__deepcopy__` (torch/storage.py)."""
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        ledger.note(TO_HOST, "pickle")
        return _unpickled, (self.host.clone(), str(self.device))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device_mode.run(func, args, kwargs or {})


class DeviceMode(TorchDispatchMode):
    """A mode in which operators create tensors on devices, and run on the devices.

    Attributes:
        current: index of the current device.
        generators: random stream of each device.
        pinned: page-locked host storages, each with the tensor for which it was allocated.
        broken: message of a device-side assertion. As on CUDA, no operator works in the process afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.generators: dict[int, torch.Generator] = {}
        self.broken = ""
        self.pinned: dict[int, weakref.ref[torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; the default check takes a tenth of the time

    def generator(self, index: int) -> torch.Generator:
        if index not in self.generators:
            self.generators[index] = torch.Generator().manual_seed(0)
        return self.generators[index]

    def drawing(self, index: int, args: Any) -> torch.Generator:
        """Return the generator of an operator.

        If the operator needs more blocks of threads than a device runs at once, the number of blocks changes the random
        values, and how far the random stream moves: `calc_execution_policy` of torch.
        """
        stream = self.generator(index)
        count = args[0].numel() if isinstance(args[0], torch.Tensor) else math.prod(args[0])
        if count <= _BLOCK * self.blocks(index):
            return stream
        state = stream.get_state().numpy().tobytes() + bytes([self.blocks(index)])
        torch.rand(self.blocks(index), generator=stream)
        return torch.Generator().manual_seed(zlib.crc32(state))

    @staticmethod
    def blocks(index: int) -> int:
        """Return the number of blocks of threads that a device runs at once; the stand-in has one per
        multiprocessor."""
        counts = os.environ.get(MULTIPROCESSORS, "132").split(",")
        return int(counts[index % len(counts)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on the device of its tensors, or on the device of its argument `device`."""
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        on_device = [tensor for tensor in tensors if type(tensor) is DeviceTensor]
        device = self._indexed(kwargs.get("device"))
        if not on_device and (device is None or device.type != "cuda"):
            if func is aten.to.device and torch.device(args[1]).type == "cuda":  # `torch.tensor(array, device="cuda")`
                with self:
                    return func.decompose(*args, **kwargs)
            return self._on_host(func, args, kwargs)
        known = operator(func)
        if known.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        if self.broken:
            raise torch.AcceleratorError(self.broken)
        ledger.launched += 1
        if known.is_copy:
            return self._copy(func, known, args, kwargs, device)
        if func is aten._fused_sdp_choice.default:
            return _MATH_ATTENTION
        _check_places(func, known, tensors, on_device, args)
        if known.waits or (known.indexes and _waits_for_mask(func, args)):
            graphs.refuse()
            ledger.note(WAITS, str(func))
            order.host_waits(order.current.marks)
        place = device or on_device[0].device
        output = self._run(func, known, _mapped(args, _host), self._host_kwargs(known, kwargs), place)
        wrappers = {id(tensor.host): tensor for tensor in on_device}

        def placed(part: torch.Tensor) -> torch.Tensor:
            return wrappers[id(part)] if id(part) in wrappers else _placed(part, place)

        wrapped = placed(output) if isinstance(output, torch.Tensor) else _mapped_output(output, placed)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if known.changes_view else wrapped

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if order.leaving:
            for at, name in operator(func).writes:
                for tensor in _tensors([args[at] if at < len(args) else kwargs.get(name)]):
                    order.host_writes(key_of(tensor), func)
        output = func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        if kwargs.get("pin_memory"):
            self.pinned[key_of(output)] = weakref.ref(output)
        return output

    def _host_kwargs(self, known: Operator, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            kwargs = dict(zip(kwargs, _mapped(kwargs.values(), _host), strict=True))
        if known.has_device:
            kwargs["device"] = torch.device("cpu")
        if known.has_generator:
            if kwargs.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            kwargs.pop("generator", None)
        return kwargs

    def _run(self, func: Any, known: Operator, args: Any, kwargs: Any, place: torch.device) -> Any:
        def compute(args: Any, kwargs: Any) -> Any:
            if known.has_generator:
                kwargs = {**kwargs, "generator": self.drawing(place.index, args)}
            return self._compute(func, known, args, kwargs)

        if graphs.capturing is not None:
            return graphs.capturing.operator(func, args, kwargs, compute)
        output = compute(args, kwargs)
        reads = {key_of(tensor) for tensor in (*_tensors(args), *_tensors(kwargs.values()))}
        written = [args[at] if at < len(args) else kwargs.get(name) for at, name in known.writes]
        new = {key_of(tensor) for tensor in _tensors([output])} - reads
        order.queued(filter(memory.is_live, reads), [*new, *map(key_of, _tensors(written))], func)
        return output

    def _compute(self, func: Any, known: Operator, args: Any, kwargs: Any) -> Any:
        if func is aten.histc.default and not args[0].is_floating_point():  # only CUDA takes integers here
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        try:
            return func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if known.asserts or (known.looks_up and "out of" in str(error)):
                self.broken = "CUDA error: device-side assert triggered"
                raise torch.AcceleratorError(self.broken) from error
            raise

    def _copy(self, func: Any, known: Operator, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        source = args[0] if func is not aten.copy_.default else args[1]
        if func is aten._to_copy.default:
            device = device or source.device
            plain = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            if source.device.type == "cpu":
                order.carry_on(source)
            _count_copy(source.device, device, kwargs.get("non_blocking", False))
            if device.type == "cpu" and kwargs.get("non_blocking"):
                return order.bring(self._run(func, known, [_host(source)], {**plain, "device": device}, source.device))
            output = self._run(func, known, [_host(source)], {**plain, "device": torch.device("cpu")}, device)
            self._left(source, device, kwargs.get("non_blocking", False))
            return _placed(output, device)
        target = args[0] if func is aten.copy_.default else args[1]
        non_blocking = len(args) > 2 and args[2]
        _count_copy(source.device, target.device, non_blocking)
        self._run(aten.copy_.default, known, [_host(target), _host(source)], {}, target.device)
        self._left(source, target.device, non_blocking)
        return target

    def _left(self, source: torch.Tensor, device: torch.device, non_blocking: bool) -> None:
        """Record a queued copy to a device: the host waits, unless the source is page-locked."""
        if source.device.type == "cpu" and device.type == "cuda" and source.dim():
            owner = self.pinned.get(key_of(source))
            if owner is None or owner() is None:
                ledger.note(PAGEABLE, "copy")
            elif non_blocking:
                order.leave(key_of(source), owner)

    def _indexed(self, device: torch.device | None) -> torch.device | None:
        if device is None or device.type != "cuda" or device.index is not None:
            return device
        return torch.device("cuda", self.current)


def _unpickled(host: torch.Tensor, device: str) -> DeviceTensor:
    return DeviceTensor(host, torch.device(device))


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.host if type(tensor) is DeviceTensor else tensor


def _placed(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else DeviceTensor(host, device)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments, also within lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _mapped(values: Iterable[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    return [
        change(value)
        if isinstance(value, torch.Tensor)
        else _mapped(value, change)
        if type(value) in (list, tuple)
        else value
        for value in values
    ]


def _mapped_output(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return type(output)(_mapped(output, change)) if type(output) in (list, tuple) else output


def _check_places(
    func: Any, known: Operator, tensors: list[torch.Tensor], on_device: list[DeviceTensor], args: Sequence[Any]
) -> None:
    """Raise an error for host tensors together with device tensors, as CUDA does. CUDA accepts host tensors of one
    number, and indices."""
    devices = {tensor.device for tensor in on_device}
    if len(devices) > 1:
        first, second, *_ = sorted(map(str, devices))
        _refuse(func, first, second)
    if not on_device or len(on_device) == len(tensors):
        return
    for tensor in tensors:
        if type(tensor) is DeviceTensor:
            continue
        is_first = tensor is args[0]
        if tensor.dim() and known.indexes and not is_first and not tensor.is_floating_point():
            ledger.note(TO_DEVICE, f"{func} of indices")
        elif tensor.dim() or not known.takes_numbers or (is_first and known.writes_first):
            _refuse(func, str(on_device[0].device), "cpu")


def _refuse(func: Any, *devices: str) -> None:
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(devices)}!"
        f" (in {func})"
    )


def _count_copy(source: torch.device, target: torch.device, non_blocking: bool) -> None:
    if source.type != target.type:
        graphs.refuse()
    if source.type == "cpu" and target.type == "cuda":
        ledger.note(TO_DEVICE, "copy")
    elif source.type == "cuda" and target.type == "cpu":
        ledger.note(TO_HOST, "copy")
        if not non_blocking:
            ledger.note(WAITS, "copy")
            order.host_waits(order.current.marks)


def _waits_for_mask(func: Any, args: Any) -> bool:
    """Return whether the host must know the number of true elements of an indexing operator's mask."""
    masks = any(isinstance(value, DeviceTensor) and value.dtype is torch.bool for value in args[1])
    return masks and (func is aten.index.Tensor or args[2].numel() != 1)


device_mode = DeviceMode()
"""The mode of this process. Each thread enters it by itself."""
