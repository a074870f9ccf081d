"""Recognises what a transformers class computes, by comparing the bytecode of its forward with that of known classes.

The kernels' results are also compared with those of the modelling code before their first use, because a later release
may change a function that the same bytecode calls.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# This import takes 0.1 s in a new process, but costs a worker nothing, because the fork server has imported the file.
from transformers.models.llama import modeling_llama as llama

from parallelformers_ng.sharding.heads import HeadParallel

# Model families whose decoder layer's forward is known; the two forwards differ in the order of arguments.
LAYERS = ("Llama", "Mixtral")
# Model family whose attention class is known → whether the class normalizes each head's query and key. The classes also
# differ in sliding windows, but the mask hides the tokens outside of a window.
ATTENTIONS = {"Llama": False, "Mistral": False, "Qwen2": False, "Qwen3": True}

# End of a class name → the known classes with such names; for example, ("Llama", "MLP") stands for `LlamaMLP`.
#
# - "Layer" computes x + attention(norm(x)), then x + feed_forward(norm(x)), with modules of any class.
# - "Model" runs its layers one after another, and does nothing between them. Only the mask differs between layer types.
# - "MLP" computes down(act(gate(x)) · up(x)).
_KNOWN = {
    "Layer": [(family, "DecoderLayer") for family in LAYERS],
    "Model": [(family, "Model") for family in ATTENTIONS],
    "MLP": [("Llama", "MLP")],
    "RMSNorm": [("Llama", "RMSNorm")],
}

# Name of a function of `torch.nn.functional` → the norm classes that it can compute. The classes of one function differ
# only in which intermediate results they round to 16 bits.
NORMS = {
    "rms_norm": (("Llama", "RMSNorm"), ("Olmo2", "RMSNorm"), ("T5", "LayerNorm")),
    "layer_norm": (("Cohere", "LayerNorm"),),
}

# A decoder layer's result does not depend on these arguments: other arguments have the positions and the cache.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position"})
_HARMLESS_IF_OFF = frozenset({"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"})

_TOLERANCE = 1e-4
log = logging.getLogger("parallelformers_ng")


def agree(what: str, results: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Return whether kernels and modelling code give the same result. Log a warning if the results differ or an error
    occurs.

    Args:
        what: beginning of the warning, which goes on with "computed by the modelling code".
        results: function that returns the kernels' result and the modelling code's result, both computed on the CPU.
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
    """Return whether a decoder layer's result depends on none of these arguments; False for an unknown argument."""
    return all(
        name in _HARMLESS or (name in _HARMLESS_IF_OFF and (value is None or value is False))
        for name, value in others.items()
    )


def is_known(module: Any, kind: str) -> bool:
    """Return whether a module's class has the code of a class that `_KNOWN` lists under `kind`."""
    cls: Any = type(module)
    return _is_known(cls, kind)


@cache
def _is_known(cls: type, kind: str) -> bool:
    return cls.__name__.endswith(kind) and _is_one_of(cls, _KNOWN[kind])


def is_silu_gated(module: Any) -> bool:
    """Return whether a module computes down(silu(gate(x)) · up(x))."""
    return is_known(module, "MLP") and type(module.act_fn) in (nn.SiLU, type(llama.ACT2FN["silu"]))


@cache
def fused_norm(cls: type) -> str:
    """Return the name of the function of `torch.nn.functional` that can compute a norm class, or ""."""
    if not cls.__name__.endswith("Norm") or issubclass(cls, nn.LayerNorm):
        return ""
    return next((name for name, known in NORMS.items() if _is_one_of(cls, known)), "")


@cache
def mixed(kernel: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kernel` and `cls`, in this order, with the name of `cls`."""
    return type(cls.__name__, (kernel, cls), {"__module__": cls.__module__})


def head_norms(attention: Any) -> list[Any] | None:
    """Return the norms of each head's query and key: two norms, or none. The result is None for attention that is not
    known."""
    cls: Any = type(attention)
    normed = _normed_heads(cls)
    return None if normed is None else [attention.q_norm, attention.k_norm] if normed else []


@cache
def _normed_heads(cls: Any) -> bool | None:
    if cls.__bases__[0] is HeadParallel:  # a sharded class has the original class as its second base
        cls = cls.__bases__[1]
    functions = getattr(inspect.unwrap(cls.forward), "__globals__", {})
    for name in ("apply_rotary_pos_emb", "rotate_half"):
        if not _same_code(functions.get(name), getattr(llama, name)):
            return None
    return next((normed for family, normed in ATTENTIONS.items() if _is_one_of(cls, [(family, "Attention")])), None)


def modelling(family: str, part: str) -> Any:
    """Return a class of a family in transformers; for example, ("Llama", "Attention") gives `LlamaAttention`."""
    file = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    return getattr(importlib.import_module(file), family + part)


def _is_one_of(cls: Any, known: Iterable[tuple[str, str]]) -> bool:
    return any(_same_code(cls.forward, modelling(*each).forward) for each in known)


def _same_code(mine: Any, theirs: Any) -> bool:
    code = _code(mine)
    return code is not None and code == _code(theirs)


def _code(function: Any) -> Any:
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    # The docstring is one of the constants, but has no effect on what the function computes.
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, constants, code.co_varnames, code.co_argcount
