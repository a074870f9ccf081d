"""Decoder layers on a CUDA device that Triton kernels compute in a CUDA graph, after a comparison with the modules.

`cuda_graphs/kernel_trial.py` makes the comparison: in the first step of a model, both compute every layer, on the
model's own inputs. Until then, and for all other steps, the modules compute.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parallelformers_ng.cuda_graphs.kernel_trial import KernelMode
from parallelformers_ng.kernels.decoder_stack import LayersAsOne, with_layers_as_one
from parallelformers_ng.kernels.device_layer import DeviceLayer, DeviceStep
from parallelformers_ng.kernels.operators import Guard, may_serve
from parallelformers_ng.kernels.recognition import is_known

_MIN_CAPABILITY = (8, 0)
_OPERATORS = {
    "norm_kernel": ("norm", "sum_and_norm"),
    "rotary_kernel": ("rotate_and_write",),
    "slot_attention": ("attend",),
    "gate_kernel": ("gated",),
    "byte_product": ("byte_product",),
    "nibble_product": ("nibble_product",),
    "partial_results": ("summed",),
}
# A layer adds a tensor to its input. Kernels and modules may differ by this fraction of the tensor's largest number.
_TOLERANCE = 2e-2


class DeviceStack(LayersAsOne):
    """Decoder layers that the kernels of `kernels/triton` may compute.

    Attributes:
        mode: how the layers compute; always "modules" outside of `StepKernels.computing`.
        is_served: whether the kernels can compute all layers of the latest step that asked for them.
        worst: largest difference between kernels and modules since the start of `StepKernels.computing`, divided by the
            allowed difference; one number on the device. None before a comparison.
    """

    mode: KernelMode = "modules"
    is_served = False
    worst: Tensor | None = None

    def run(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        if self.mode == "modules" or not may_serve(hidden.device.type):
            return super().run(hidden, **kwargs)
        step, known = DeviceStep.of(hidden, **kwargs), self.view()
        self.is_served = step is not None and known is not None and all(layer.fits(hidden, step) for layer in known)
        if step is None or known is None or not self.is_served or self.mode == "watched":
            return super().run(hidden, **kwargs)
        if self.mode == "both":
            for layer, module in zip(known, self, strict=True):
                hidden = self._compared(layer, module, hidden, step, kwargs)
            return hidden
        residual, added = known[0].run(hidden, None, step)
        for layer in known[1:]:
            residual, added = layer.run(residual, added, step)
        return known[-1].output(residual, added)

    def _compared(
        self, layer: DeviceLayer, module: Any, hidden: Tensor, step: DeviceStep, kwargs: dict[str, Any]
    ) -> Tensor:
        """Compute a layer by the kernels and by its module, record the difference, and return the module's output."""
        cached = layer.cached(step)
        count = cached.cumulative_length
        position = count.view(1).clone()

        def written() -> list[Tensor]:
            return [states.index_select(2, position) for states in (cached.keys, cached.values)]

        ours = layer.output(*layer.run(hidden, None, step)), *written()
        counted = count - position
        count.copy_(position.view(()))
        output: Tensor = module(hidden, **kwargs)
        theirs = output, *written()
        for mine, wanted, added in zip(ours, theirs, (output - hidden, *theirs[1:]), strict=True):
            self._note(_excess(mine, wanted, added))
        self._note((counted != 1).float().max() * 2)  # above the limit of 1 unless each token was counted once
        return output

    def _note(self, excess: Tensor) -> None:
        excess = torch.nan_to_num(excess.float(), nan=torch.inf)
        self.worst = excess if self.worst is None else self.worst.maximum(excess)

    def _new_view(self) -> tuple[list[DeviceLayer] | None, Sequence[Guard]]:
        known = [layer for module in self if (layer := DeviceLayer.of(module, _operators())) is not None]
        if not known or len(known) < len(self):
            return None, ()
        return known, [layer.guard for layer in known]


def _excess(ours: Tensor, theirs: Tensor, added: Tensor) -> Tensor:
    """Return the largest difference between two results, divided by the allowed difference.

    Args:
        added: output of the layer without its input. `_TOLERANCE` of its largest number is allowed, plus the rounding
            of `theirs`.
    """
    rounding = 2 * torch.finfo(theirs.dtype).eps * theirs.abs().max().float()
    return (ours.float() - theirs.float()).abs().max() / (_TOLERANCE * added.abs().max().float() + rounding)


class StepKernels:
    """The Triton kernels of one rank's model, as `KernelTrial` uses them.

    Args:
        stacks: lists of decoder layers in the model.
        device: CUDA device of the rank.
    """

    def __init__(self, stacks: list[DeviceStack], device: torch.device) -> None:
        self._stacks = stacks
        self._device = device

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> StepKernels | None:
        stacks = [module for module in model.modules() if isinstance(module, DeviceStack)]
        return cls(stacks, device) if stacks else None

    def obstacle(self) -> str:
        """Return why Triton kernels cannot run on the device. If they can, import them and return ""."""
        if find_spec("triton") is None:
            return "Triton is not installed"
        if torch.version.hip is not None:
            return "the device is not one of NVIDIA"
        capability = torch.cuda.get_device_capability(self._device)
        if capability < _MIN_CAPABILITY:
            return f"the device has compute capability {'.'.join(map(str, capability))}, and 8.0 is the least"
        _operators()
        return ""

    @contextlib.contextmanager
    def computing(self, mode: KernelMode) -> Iterator[None]:
        """Set how decoder layers compute in the `with` block. Differences that were recorded before are dropped."""
        for stack in self._stacks:
            stack.mode, stack.is_served, stack.worst = mode, False, None
        try:
            yield
        finally:
            for stack in self._stacks:
                stack.mode = "modules"

    def are_served(self) -> bool:
        return all(stack.is_served for stack in self._stacks)

    def difference(self) -> str:
        """Wait for the device, and describe a too large difference between kernels and modules, or return ""."""
        worst = max(torch.inf if stack.worst is None else stack.worst.item() for stack in self._stacks)
        return "" if worst <= 1 else f"they differ from the modules by {worst:.1f} times what is allowed"


def install_stacks(model: nn.Module) -> None:
    """Change the classes of a model's decoder layers, so that Triton kernels may compute them."""
    for module in [*model.modules()]:
        layers: Any = getattr(module, "layers", None)
        if type(layers) is nn.ModuleList and is_known(module, "Model"):
            cls: type = type(module)
            layers.__class__ = DeviceStack
            module.__class__ = with_layers_as_one(cls, "cuda")


@functools.cache
def _operators() -> Any:
    """Import `kernels/triton`, and return an object that has its operators as attributes."""
    files = {file: importlib.import_module(f"{__package__}.triton.{file}") for file in _OPERATORS}
    return SimpleNamespace(**{name: getattr(files[file], name) for file, names in _OPERATORS.items() for name in names})
