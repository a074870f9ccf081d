"""Gives the modules of a rank the classes whose work the kernels do."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor, nn

from parallelformers_ng.kernels.decoder_layer import FusedDecoderLayer
from parallelformers_ng.kernels.decoder_stack import DecoderStack, with_layers_as_one
from parallelformers_ng.kernels.operators import FusedRMSNorm, StreamingLinear, _decode
from parallelformers_ng.kernels.recognition import ATTENTIONS, LAYERS, is_decoder, is_decoder_layer, is_rms_norm
from parallelformers_ng.kernels.self_check import agrees


def install(model: nn.Module, left: Collection[str] = ()) -> int:
    """Change the classes of what the kernels can serve, where the kernels are there and torch has one thread.

    Args:
        model: its tensors may still be missing.
        left: paths of modules that stay as they are, whose parameters must be read as attributes.

    Returns:
        How many modules were changed.
    """
    if _decode is None or torch.get_num_threads() > 1:
        return 0
    return _change(model, left)


def forget(model: nn.Module) -> None:
    """Have the kernels read a model's modules anew: attributes of theirs were set."""
    for module in model.modules():
        if isinstance(module, (FusedDecoderLayer, DecoderStack)):
            module.forget()


def _change(model: nn.Module, left: Collection[str] = (), checked: bool = False) -> int:
    """
    Args:
        checked: whether decoder layers are known to be computed as the installed transformers computes them.
    """
    changed = 0
    for path, module in model.named_modules():
        cls: type = type(module)
        if path in left:
            continue
        if cls is nn.Linear:
            module.__class__ = StreamingLinear
        elif is_rms_norm(cls) and isinstance(module._parameters.get("weight"), Tensor):
            module.__class__ = _mixed(FusedRMSNorm, cls)
        elif is_decoder_layer(cls) and (checked or _layers_agree()):
            module.__class__ = _mixed(FusedDecoderLayer, cls)
        elif is_decoder(cls) and type(module.layers) is nn.ModuleList and (checked or _layers_agree()):
            module.layers.__class__ = DecoderStack
            module.__class__ = _with_layers_as_one(cls)
        else:
            continue
        changed += 1
    return changed


@cache
def _layers_agree() -> bool:
    return agrees(dict.fromkeys((*ATTENTIONS, *LAYERS)), lambda model: _change(model, checked=True))


_with_layers_as_one = cache(with_layers_as_one)


@cache
def _mixed(kernel: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (kernel, cls), {"__module__": cls.__module__})
