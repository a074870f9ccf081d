"""Tensors that say they are on a CUDA device, and the rules by which they meet those of the host."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.pretend_cuda.ledger import TO_DEVICE, TO_HOST, WAITS, ledger

aten = torch.ops.aten

_COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
_LOOK_UPS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_ASSERTIONS = {aten._assert_async.default, aten._assert_async.msg}
_TAKE_HOST_SCALARS = {
    *(aten.fill.Tensor, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor),
    *(aten.where.self, aten.where.self_out),
}
_MATH_ATTENTION = 0

_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[int, DeviceTensor] = weakref.WeakValueDictionary()


class DeviceTensor(torch.Tensor):
    """A tensor on a device.

    Attributes:
        host: the same memory, as a tensor of the host.
    """

    host: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> DeviceTensor:
        with torch.inference_mode(host.is_inference()):  # a view is what its base is, whatever the mode
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=device,
                requires_grad=host.requires_grad,
            )
        self.host = host.detach()
        _alive[next(_numbers)] = self
        return self

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        ledger.note(TO_HOST, "pickle")
        return _unpickled, (self.host.clone(), str(self.device))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with device_mode:
            return func(*args, **(kwargs or {}))


class DeviceMode(TorchDispatchMode):
    """Within it, operators make tensors on devices, and run on those.

    Attributes:
        current: the index of the current device.
        generators: the random stream of each device.
        broken: what a device-side assertion said. As on CUDA, nothing works in the process afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.generators: dict[int, torch.Generator] = {}
        self.broken = ""

    def generator(self, index: int) -> torch.Generator:
        if index not in self.generators:
            self.generators[index] = torch.Generator().manual_seed(0)
        return self.generators[index]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        devices = {value.device for value in flat if isinstance(value, DeviceTensor)}
        device = self._indexed(kwargs.get("device"))
        if not devices and (device is None or device.type != "cuda"):
            return func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        if self.broken:
            raise torch.AcceleratorError(self.broken)
        if func in _COPIES:
            return self._copy(func, args, kwargs, device)
        if func is aten._fused_sdp_choice.default:
            return _MATH_ATTENTION
        _check_places(func, flat, devices)
        _count_waits(func, args, flat)
        place = device or next(iter(devices))
        hosts = [value.host if isinstance(value, DeviceTensor) else value for value in flat]
        host_args, host_kwargs = tree_unflatten(hosts, spec)
        host_kwargs = {name: value for name, value in host_kwargs.items() if name not in ("device", "pin_memory")}
        if any(argument.name == "device" for argument in func._schema.arguments):
            host_kwargs["device"] = torch.device("cpu")
        if any(argument.name == "generator" for argument in func._schema.arguments):
            if host_kwargs.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            host_kwargs["generator"] = self.generator(place.index)
        output = self._run(func, host_args, host_kwargs)
        given = {id(value.host): value for value in flat if isinstance(value, DeviceTensor)}

        def placed(part: torch.Tensor) -> torch.Tensor:
            return given[id(part)] if id(part) in given else _placed(part, place)

        wrapped = tree_map_only(torch.Tensor, placed, output)
        if torch.Tag.inplace_view in func.tags:
            return return_and_correct_aliasing(func, args, kwargs, wrapped)
        return wrapped

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.histc.default and not args[0].is_floating_point():  # integers, which it takes on CUDA alone
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        try:
            return func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if func in _ASSERTIONS or (func in _LOOK_UPS and "out of" in str(error)):
                self.broken = "CUDA error: device-side assert triggered"
                raise torch.AcceleratorError(self.broken) from error
            raise

    def _copy(self, func: Any, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        source = args[0] if func is not aten.copy_.default else args[1]
        if func is aten._to_copy.default:
            device = device or source.device
            plain = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            host = func(_host(source), **plain, device=torch.device("cpu"))
            _count_copy(source.device, device, kwargs.get("non_blocking", False))
            return _placed(host, device)
        target = args[0] if func is aten.copy_.default else args[1]
        _count_copy(source.device, target.device, False if len(args) < 3 else args[2])
        _host(target).copy_(_host(source))
        return target

    def _indexed(self, device: torch.device | None) -> torch.device | None:
        if device is None or device.type != "cuda" or device.index is not None:
            return device
        return torch.device("cuda", self.current)


def allocated(index: int) -> int:
    """Bytes of the tensors on a device."""
    storages = (tensor.host.untyped_storage() for tensor in _on(index))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _on(index: int) -> Iterator[DeviceTensor]:
    return (tensor for tensor in list(_alive.values()) if tensor.device.index == index)


def _unpickled(host: torch.Tensor, device: str) -> DeviceTensor:
    return DeviceTensor(host, torch.device(device))


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor


def _placed(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else DeviceTensor(host, device)


def _check_places(func: Any, values: list[Any], devices: set[torch.device]) -> None:
    """Refuse tensors of host and device together where CUDA does: it takes numbers, and indices."""
    if len(devices) > 1:
        first, second, *_ = sorted(map(str, devices))
        _refuse(func, first, second)
    if not devices:
        return
    scalars = torch.Tag.pointwise in func.tags or func in _TAKE_HOST_SCALARS
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    first_is_written = bool(written) and written[0]
    for at, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            continue
        is_index = func in _INDEXING and not value.is_floating_point() and at > 0
        is_number = value.dim() == 0 and not (at == 0 and first_is_written)
        if is_index and value.dim():
            ledger.note(TO_DEVICE, f"{func} of indices")
        elif not (is_number and (scalars or func in _INDEXING)):
            _refuse(func, str(next(iter(devices))), "cpu")


def _refuse(func: Any, *devices: str) -> None:
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(devices)}!"
        f" (in {func})"
    )


def _count_copy(source: torch.device, target: torch.device, non_blocking: bool) -> None:
    if source.type == "cpu" and target.type == "cuda":
        ledger.note(TO_DEVICE, "copy")
    elif source.type == "cuda" and target.type == "cpu":
        ledger.note(TO_HOST, "copy")
        if not non_blocking:
            ledger.note(WAITS, "copy")


def _count_waits(func: Any, args: Any, values: list[Any]) -> None:
    """Operators whose result's shape, or whose result, the host has to know."""
    if func in _INDEXING:
        masks = any(isinstance(value, DeviceTensor) and value.dtype is torch.bool for value in args[1])
        waits = masks and (func is aten.index.Tensor or args[2].numel() != 1)
    else:
        waits = bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))
    if waits:
        ledger.note(WAITS, str(func))


device_mode = DeviceMode()
"""The one of this process. A thread enters it for itself."""
