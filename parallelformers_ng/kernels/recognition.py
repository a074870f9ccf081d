"""Recognises what a transformers class computes, by comparing the bytecode of its forward with that of known classes.

The kernels' results are also compared with those of the modelling code before their first use, because a later release
may change a function that the same bytecode calls.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# This import takes a tenth of a second, mostly for modules that every model file imports, and that a waiting worker has
# already imported.
from transformers.models.llama import modeling_llama as llama

from parallelformers_ng.sharding.heads import HeadParallel

# Model families whose decoder layers are known. Their forwards differ in the order of arguments.
LAYERS = ("Llama", "Mixtral")
# Model families whose attention is known → whether it normalizes each head's query and key. The families also differ in
# sliding windows, but the mask hides the tokens outside of a window.
ATTENTIONS = {"Llama": False, "Mistral": False, "Qwen2": False, "Qwen3": True}

# Known norm classes, by the name of the torch function that computes the norm. All have a weight and a
# `variance_epsilon`; the classes differ in the intermediate results that are rounded to 16 bits.
NORMS = {
    "rms_norm": (("Llama", "RMSNorm"), ("Olmo2", "RMSNorm"), ("T5", "LayerNorm")),
    "layer_norm": (("Cohere", "LayerNorm"),),
}

# Arguments of a layer that do not change the result for new tokens over a cache.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position"})
_HARMLESS_IF_OFF = frozenset({"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"})

_TOLERANCE = 1e-4
log = logging.getLogger("parallelformers_ng")


def agree(what: str, results: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Return whether kernels and modelling code give the same result. Log a warning if they differ or raise an error.

    Args:
        what: beginning of the warning, before "computed by the modelling code".
        results: function that returns the result of the kernels and that of the modelling code, on the CPU.
    """
    try:
        with torch.inference_mode(), torch.device("cpu"):
            ours, wanted = results()
            distance = ((ours - wanted).norm() / wanted.norm()).item()
        reason = "" if distance < _TOLERANCE else f"results of the kernels differ by {distance:.1e}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        log.warning("%s computed by the modelling code: %s", what, reason)
    return not reason


def are_harmless(others: dict[str, Any]) -> bool:
    """Whether a layer's result depends on none of these arguments; False for arguments that this function does not
    know."""
    return all(
        name in _HARMLESS or (name in _HARMLESS_IF_OFF and (value is None or value is False))
        for name, value in others.items()
    )


@cache
def is_rms_norm(cls: type) -> bool:
    return cls.__name__.endswith("Norm") and _same_forward(cls, llama.LlamaRMSNorm)


@cache
def fused_norm(cls: type) -> str:
    """Return the `torch.nn.functional` function that computes a norm class, by name; "" for an unknown class."""
    if not cls.__name__.endswith("Norm") or issubclass(cls, nn.LayerNorm):
        return ""
    known = (name for name, theirs in NORMS.items() if any(_same_forward(cls, modelling(*each)) for each in theirs))
    return next(known, "")


@cache
def mixed(kernel: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kernel` and `cls`, in this order, that has the name of `cls`."""
    return type(cls.__name__, (kernel, cls), {"__module__": cls.__module__})


@cache
def is_decoder_layer(cls: type) -> bool:
    """Whether a class computes x + attention(norm(x)), then x + feed_forward(norm(x)), with modules of any class."""
    return cls.__name__.endswith("Layer") and any(
        _same_forward(cls, modelling(family, "DecoderLayer")) for family in LAYERS
    )


@cache
def is_decoder(cls: type) -> bool:
    """Whether a model class runs decoder layers one after another, and does nothing between them. All layers must get
    the same arguments, except for a mask of their layer type."""
    return cls.__name__.endswith("Model") and any(
        _same_forward(cls, modelling(family, "Model")) for family in ATTENTIONS
    )


@cache
def is_gated_feed_forward(cls: type) -> bool:
    """Whether a class computes down(act(gate(x)) · up(x))."""
    return _same_forward(cls, llama.LlamaMLP)


def is_silu(cls: type) -> bool:
    return cls in (nn.SiLU, type(llama.ACT2FN["silu"]))


@cache
def normed_heads(cls: Any) -> bool | None:
    """Return whether an attention class normalizes each head's query and key; None if it is not in `ATTENTIONS`.

    For a class with sharded heads (`HeadParallel`), the class that it was made from counts.
    """
    if cls.__bases__[0] is HeadParallel:
        cls = cls.__bases__[1]
    functions = getattr(inspect.unwrap(cls.forward), "__globals__", {})
    for name in ("apply_rotary_pos_emb", "rotate_half"):
        if not _same_code(functions.get(name), getattr(llama, name)):
            return None
    for family, normed in ATTENTIONS.items():
        if _same_forward(cls, modelling(family, "Attention")):
            return normed
    return None


def modelling(family: str, part: str) -> Any:
    """Return a class of a family in transformers; for example, ("Llama", "Attention") gives `LlamaAttention`."""
    file = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    return getattr(importlib.import_module(file), family + part)


def _same_forward(mine: Any, theirs: Any) -> bool:
    return _same_code(mine.forward, theirs.forward)


def _same_code(mine: Any, theirs: Any) -> bool:
    code = _code(mine)
    return code is not None and code == _code(theirs)


def _code(function: Any) -> Any:
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    # Leave out the docstring, which is one of the constants.
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, constants, code.co_varnames, code.co_argcount
