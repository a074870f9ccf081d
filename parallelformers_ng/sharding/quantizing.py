"""Chooses which weights to quantize, from the caller's options, the kinds of layers, and the plans of the tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.errors import ParallelError, UnsupportedModelError, did_you_mean
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.experts import takes_experts_one_by_one
from parallelformers_ng.sharding.tensor_plan import TensorPlan
from parallelformers_ng.sharding.tensors import dotted, is_within
from parallelformers_ng.sharding.vocabulary import vocabulary_modules
from parallelformers_ng.sharding.wording import pattern_of


def choose_encodings(
    model: nn.Module, options: QuantizeOptions | None, tensors: Mapping[str, TensorPlan], blocks: Sequence[str]
) -> tuple[dict[str, Encoding], dict[str, str]]:
    """Return name → encoding of the weights to quantize, and name → reason of those that cannot be quantized.

    Weights of linear layers, `Conv1D` and stacked experts are quantized; embeddings and the head only if the options
    say so. A shared weight is quantized only if every module that shares it can compute with it. Without a scheme in
    the options, weights that the checkpoint has quantized stay quantized.
    """
    stored, dequantize = _stored(model), options is not None and options.dequantize
    if options is not None and options.scheme is None:
        options = None
    if stored and options is not None and not dequantize:
        kinds = ", ".join(sorted({encoding.kind for encoding in stored.values() if encoding is not None}))
        raise ParallelError(
            f"quantize: the weights of {type(model).__name__} are {kinds or 'quantized'} already; leave quantize out,"
            " or add 'dequantize': True to quantize these weights again"
        )
    left = set() if options is None else _left_whole(model, options, blocks)
    encodings: dict[int, dict[str, Encoding | None]] = {}
    misfits: dict[str, str] = {}
    for path, module in model.named_modules():
        for short, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, dim = dotted(path, short), _input_dim(module, short, parameter.ndim)
            encoding = stored.get(id(parameter)) if options is None else None
            if options is not None and dim is not None and path not in left:
                encoding = Encoding(str(options.scheme), dim, options.block or parameter.shape[dim])
            why = "" if encoding is None else encoding.misfit(tensors[name])
            if encoding is not None and encoding.dim != dim:
                why = "its module cannot compute with quantized weights"
            elif encoding is None and options is None and id(parameter) in stored:
                why = "it is made from stored tensors in a way that does not keep their scales"
            if why:
                misfits[name] = why
            encodings.setdefault(id(parameter), {})[name] = None if why else encoding
    chosen: dict[str, Encoding] = {}
    for names in encodings.values():
        if len(set(names.values())) == 1:
            chosen |= {name: encoding for name, encoding in names.items() if encoding is not None}
        elif options is None:
            reason = "not all modules that share it can compute with quantized weights"
            misfits |= {name: reason for name in names if name not in misfits}
    if options is None and misfits and not dequantize:
        refuse_high_precision(type(model).__name__, misfits)
    return chosen, misfits


def refuse_high_precision(model: str, reasons: Mapping[str, str]) -> NoReturn:
    """Raise UnsupportedModelError for weights that are stored quantized but would be in high precision on the ranks."""
    layers = {pattern_of(name): f"{pattern_of(name)} ({why})" for name, why in reasons.items()}
    raise UnsupportedModelError(
        f"{model} is stored quantized, but ranks would have some weights in high precision:"
        f" {', '.join(layers.values())}. To allow that, pass quantize={{'dequantize': True}}"
    )


def border(model: nn.Module, options: QuantizeOptions | None) -> int:
    """Return the number of consecutive inputs that must stay on one rank because these inputs share one scale.

    The result is 1 if ranks may cut between any two inputs. If weights are stored in blocks of several sizes, the
    result is the least common multiple of the sizes.
    """
    if options is not None and options.scheme is not None:
        return options.block or 1
    stored = _stored(model)
    encoded = [(encoding, p.shape) for p in model.parameters() if (encoding := stored.get(id(p))) is not None]
    return math.lcm(*{encoding.block for encoding, shape in encoded if encoding.block < shape[encoding.dim]})


def is_stored_quantized(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "is_quantized_within", False)


def _stored(model: nn.Module) -> dict[int, Encoding | None]:
    """Return `id(parameter)` → encoding for the parameters that the checkpoint stores quantized.

    The encoding is None if the parameter is made from several stored tensors and cannot keep their scales.
    """
    stored: list[Any] = [tensor for tensor in model.parameters() if is_stored_quantized(tensor)]
    return {id(tensor): tensor.encoding for tensor in stored}


def _left_whole(model: nn.Module, options: QuantizeOptions, blocks: Sequence[str]) -> set[str]:
    paths = {id(module): path for path, module in model.named_modules()}
    left = _skipped(options.skip, list(paths.values()), blocks)
    if options.embeddings:
        return left
    named = [id(module) for pair in vocabulary_modules(model) for module in pair]
    tables = {path for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return left | tables | {paths[number] for number in named if number in paths}


def _input_dim(module: nn.Module, name: str, ndim: int) -> int | None:
    """Return the dimension along which a parameter is quantized, -1 or -2; None if it cannot be quantized."""
    if takes_experts_one_by_one(module):
        return (-2 if module.is_transposed else -1) if ndim == 3 else None
    if name != "weight" or ndim != 2 or isinstance(module, NonDynamicallyQuantizableLinear):
        return None
    if isinstance(module, nn.Linear) or type(module) is nn.Embedding:
        return -1
    return -2 if isinstance(module, Conv1D) else None


def _skipped(patterns: Sequence[str], paths: Sequence[str], blocks: Sequence[str]) -> set[str]:
    starts = [re.escape(f"{block}.") for block in blocks if block]
    above = f"({'|'.join(starts)})?"
    skipped: set[str] = set()
    for pattern in patterns:
        wanted = re.compile(above + re.escape(pattern).replace(r"\*", "[^.]+") + r"(\..+)?")
        named = {path for path in paths if wanted.fullmatch(path)}
        if not named:
            below = {path.removeprefix(f"{block}.") for block in blocks for path in paths if is_within(path, block)}
            hint = did_you_mean(pattern, below) or "; it takes paths as policies write them, 'self_attn.o_proj'"
            raise ParallelError(f"quantize: skip names {pattern!r}, but no layer of the model matches{hint}")
        skipped |= named
    return skipped
