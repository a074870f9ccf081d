"""Counts the kernels that a device launches for the operators of a step, and the bytes that these kernels read and
write.

An operator is one kernel, except for views, allocations without a fill, exchanges (a single rank has none), and the
operators below. The table names the place in torch's source (2.13). A copy into a part of a tensor counts that part.

| operator | kernels | source |
| --- | --- | --- |
| `linear`, `matmul` | one product | `native/Linear.cpp`, `native/LinearAlgebra.cpp`; `cuda/Blas.cpp` |
| `rms_norm` | 1 if input and weight are of one type, else those of its parts | `rms_norm_symint` in `native/layer_norm.cpp`; `_fused_rms_norm` has a CUDA kernel in `native_functions.yaml` |
| `attend` of `kernels/triton` | 2 | `slot_attention.py` |
| `layer_norm` | 1 | `native_layer_norm`, `cuda/layer_norm_kernel.cu` |
| `scaled_dot_product_attention` | 1; 2 more for a mask of booleans | `convert_boolean_attn_mask_` in `native/transformers/attention.cpp`: a fill and a `where`; its output is `[batch, queries, heads, width]` in memory, `mem_eff_attention`'s and cuDNN's |
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelformers_ng.cuda_graphs.recorder import CudaRecorder
from parallelformers_ng.kernels.on_devices import DeviceLayerNorm, DeviceRMSNorm
from tests.pretend_cuda.worker import PretendedRunner

aten = torch.ops.aten

_WHOLE = {
    aten.linear.default: 1,
    aten.matmul.default: 1,
    aten.layer_norm.default: 1,
    aten.rms_norm.default: 1,
    aten.scaled_dot_product_attention.default: 1,
}
_TWO_LAUNCHES = {"parallelformers_ng::attend"}
_OF_MASK = 2
_NOTHING = {
    *(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default),
    aten._unsafe_view.default,
}
_EXCHANGES = {torch.ops.parallelformers_ng.all_reduce.default, torch.ops.parallelformers_ng.all_gather.default}


class KernelCount(TorchDispatchMode):
    """A counter of kernels.

    Attributes:
        kernels: names of the kernels, in order.
        moved: for each kernel, the shapes and bytes of the tensors that it reads and writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.moved: list[list[tuple[tuple[int, ...], int]]] = []

    def bytes_of(self, numel: int) -> int:
        """Return the bytes read and written of tensors with `numel` elements."""
        return sum(size for tensors in self.moved for shape, size in tensors if torch.Size(shape).numel() == numel)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WHOLE or (func is aten.rms_norm.default and args[0].dtype is not args[2].dtype):
            with self:  # in inference mode, composite operators arrive whole
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if func is aten.scaled_dot_product_attention.default:
            output = output.transpose(1, 2).contiguous().transpose(1, 2)  # the layout of the device's kernels
        if not (_is_view(func) or func in _NOTHING or func in _EXCHANGES or _is_on_host(output, args)):
            kernels = [str(func)] * (2 if func.name() in _TWO_LAUNCHES else _WHOLE.get(func, 1))
            mask = next(iter(args[3:4]), kwargs.get("attn_mask"))
            if func is aten.scaled_dot_product_attention.default and mask is not None and mask.dtype is torch.bool:
                kernels += ["conversion of a mask"] * _OF_MASK
            self.kernels += kernels
            touched = (
                (args[3], args[3]) if func is aten.index_copy_.default else (args, {**kwargs, "out": None}, output)
            )
            self.moved.append([(tuple(each.shape), each.nbytes) for each in _tensors(touched)])
        return output


class CountingRecorder(CudaRecorder):
    """A recorder that counts the kernels of each step.

    Attributes:
        latest: count of the latest recording.
    """

    latest = KernelCount()

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        def counted() -> Any:
            with CountingRecorder.latest:
                return step()

        CountingRecorder.latest = KernelCount()
        return super().record(counted)


class CountingRunner(PretendedRunner):
    """A rank that reports the kernels of its latest recording."""

    def recorder(self) -> CudaRecorder | str:
        usual = super().recorder()
        return usual if isinstance(usual, str) else CountingRecorder(self.device)

    def launched(self) -> dict[str, int]:
        """Return the kernels of the latest recording: name → number."""
        return dict(Counter(CountingRecorder.latest.kernels))

    def changed_code(self) -> list[str]:
        """Return the places with code of the caller's program."""
        return sorted(self.code._before)

    def norms(self) -> dict[str, int]:
        """Return the norms with one kernel: class → number."""
        kinds = (DeviceRMSNorm, DeviceLayerNorm)
        return dict(Counter(type(module).__name__ for module in self.model.modules() if isinstance(module, kinds)))

    def moved(self, numel: int) -> int:
        """Return `KernelCount.bytes_of` of the latest recording."""
        return CountingRecorder.latest.bytes_of(numel)


def _is_view(func: Any) -> bool:
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _is_on_host(output: Any, args: Any) -> bool:
    """Return whether an operator computed on the host. One without an output writes to its arguments."""
    return all(each.device.type == "cpu" for each in _tensors(args if output is None else output))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
