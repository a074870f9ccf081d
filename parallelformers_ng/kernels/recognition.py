"""Recognises the computation of a transformers class by the instructions of its forward, under any name."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

# It takes a tenth of a second, nine tenths of it for what every model's file imports: a worker that is waiting for a
# model has that behind it.
from transformers.models.llama import modeling_llama as llama

LAYERS = ("Llama", "Mixtral")
"""Decoder layers that differ in the order of their arguments."""
ATTENTIONS = {"Llama": False, "Mistral": False, "Qwen2": False, "Qwen3": True}
"""Attentions that one kernel computes, and whether they norm each head's query and key. Windows, in which they differ
as well, come to a single query with its mask."""

NORMS = {
    "rms_norm": (("Llama", "RMSNorm"), ("Olmo2", "RMSNorm"), ("T5", "LayerNorm")),
    "layer_norm": (("Cohere", "LayerNorm"),),
}
"""Norms with a weight and a `variance_epsilon` that a function of torch's computes, by its name. They differ in what
they round to 16 bits in between."""


@cache
def is_rms_norm(cls: type) -> bool:
    """Llama's root-mean-square norm."""
    return cls.__name__.endswith("Norm") and _same_forward(cls, llama.LlamaRMSNorm)


@cache
def fused_norm(cls: type) -> str:
    """Return the function of `torch.nn.functional` that computes a norm of this class, "" if none is known to."""
    if not cls.__name__.endswith("Norm") or issubclass(cls, nn.LayerNorm):
        return ""
    known = (name for name, theirs in NORMS.items() if any(_same_forward(cls, modelling(*each)) for each in theirs))
    return next(known, "")


@cache
def mixed(kernel: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class of a model with a kernel in front, under its own name."""
    return type(cls.__name__, (kernel, cls), {"__module__": cls.__module__})


@cache
def is_decoder_layer(cls: type) -> bool:
    """Llama's decoder layer: x + attention(norm(x)), and then the same with a feed-forward, of any kind."""
    return cls.__name__.endswith("Layer") and any(
        _same_forward(cls, modelling(family, "DecoderLayer")) for family in LAYERS
    )


@cache
def is_decoder(cls: type) -> bool:
    """Return a model whose decoder layers get the same arguments one after another, but for a mask of their type,
    and nothing else happens between them."""
    return cls.__name__.endswith("Model") and any(
        _same_forward(cls, modelling(family, "Model")) for family in ATTENTIONS
    )


@cache
def is_gated_feed_forward(cls: type) -> bool:
    """Llama's: down(act(gate(x)) · up(x))."""
    return _same_forward(cls, llama.LlamaMLP)


def is_computed_at_once(layer: nn.Module) -> bool:
    """Return whether a call of the kernels is all of a module: a decoder layer whose attention and feed-forward they
    know."""
    cls: Any = type(layer)
    if not is_decoder_layer(cls):
        return False
    attention: Any = type(layer.self_attn)
    feed_forward: Any = type(getattr(layer, "mlp", None))
    return normed_heads(attention) is not None and is_gated_feed_forward(feed_forward)


def is_silu(cls: type) -> bool:
    """x · sigmoid(x)."""
    return cls in (nn.SiLU, type(llama.ACT2FN["silu"]))


@cache
def normed_heads(cls: Any) -> bool | None:
    """Return whether an attention like Llama's norms each head's query and key; None for an attention of another
    kind."""
    functions = getattr(inspect.unwrap(cls.forward), "__globals__", {})
    for name in ("apply_rotary_pos_emb", "rotate_half"):
        if not _same_code(functions.get(name), getattr(llama, name)):
            return None
    for family, normed in ATTENTIONS.items():
        if _same_forward(cls, modelling(family, "Attention")):
            return normed
    return None


def modelling(family: str, part: str) -> Any:
    """Return a class of transformers' file for a family: ("Llama", "Attention")."""
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
    # Docstrings are among the constants.
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, constants, code.co_varnames, code.co_argcount
