"""Decides, from the source of modelling code, whether the code only calls a layer.

A layer that is only called can be cut by columns, with gathered outputs. A layer whose weight or widths the code reads
directly cannot be cut in this way.
"""

from __future__ import annotations

import inspect
import re
import types
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.live_code.functions import functions_in, names_in
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTS_AND_WIDTHS = frozenset({
    "weight", "in_features", "out_features", "num_embeddings", "embedding_dim", "nf", "nx",
    "in_channels", "out_channels",
})  # fmt: skip
_HARMLESS = re.compile(r"\.weight\.(dtype|device)\b")
_NEVER_CALLED = {
    "__init__", "_init_weights", "reset_parameters", "extra_repr", "create_weight", "resize_position_embeddings",
    "get_position_embeddings",
}  # fmt: skip
# Expressions that an embedding's forward may return if it only looks up rows of its weight, and scales them.
_ROWS = re.compile(
    r"super\(\)\.forward\([^()]*\)( \* self\.embed_scale(\.to\(self\.weight\.dtype\))?)?"
    r"|self\.weight\[([^\[\],]|\[\d\])*\]"
)


def is_only_called(model: nn.Module, path: str) -> bool:
    """Return whether modelling code only calls the layer at `path`, without reading the layer's weight or widths.

    The check is cautious: the class of the parent module must not read the weight or a width of any module (lists of
    modules do not count as parents). The result is False for layers of unknown classes, and if source code is missing.
    """
    module = model.get_submodule(path)
    cls: type = type(module)
    owner: type = type(_owner(model, path))
    plain = cls in (nn.Linear, nn.Embedding, Conv1D, *CONVOLUTIONS)
    rows = isinstance(module, nn.Embedding) and not any(True for _ in module.children()) and _gives_rows(cls)
    return (plain or rows) and not _reads(owner, WEIGHTS_AND_WIDTHS)


def reads_parameters(model: nn.Module, path: str) -> bool:
    """Return whether the parent of the module at `path` reads the module's parameters directly.

    The check is cautious: any read of an attribute with such a name counts, and so does missing source code.
    """
    owner: type = type(_owner(model, path))
    return _reads(owner, frozenset(model.get_submodule(path)._parameters))


def _owner(model: nn.Module, path: str) -> nn.Module:
    path = path.rpartition(".")[0]
    while path and type(model.get_submodule(path)) in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
        path = path.rpartition(".")[0]
    return model.get_submodule(path)


@cache
def _gives_rows(cls: type[nn.Module]) -> bool:
    """Return whether the forward of an embedding class only looks up rows of its weight; it may compute the indices."""
    own = {name: method for name, method in vars(cls).items() if inspect.isfunction(method)}
    if cls.__base__ is not nn.Embedding or set(own) - _NEVER_CALLED != {"forward"}:
        return False
    source = _source(own["forward"])
    if source is None:
        return False
    answers = re.findall(r"^\s+return (.*)$", source, re.MULTILINE)
    others = _HARMLESS.sub("", re.sub(r"^\s+return .*$", "", source, flags=re.MULTILINE))
    return all(_ROWS.fullmatch(answer) for answer in answers) and not re.search(r"\.weight\b", others)


@cache
def _reads(cls: type[nn.Module], names: frozenset[str]) -> bool:
    if cls.__module__.startswith("torch."):
        return True
    for base in cls.__mro__:
        if base in (nn.Module, nn.Linear, nn.Embedding, PreTrainedModel):
            break
        written = [value for name, value in vars(base).items() if name not in _NEVER_CALLED]
        if any(reads_attributes(each.__code__, names) for value in written for each in functions_in(value)):
            return True
    return False


@cache
def reads_attributes(code: types.CodeType, names: frozenset[str]) -> bool:
    """Whether the code reads an attribute with one of these names. `weight.dtype` and `weight.device` do not count."""
    if not names_in(code) & names:
        return False
    source = _source(code)
    return source is None or bool(re.search(rf"\.({'|'.join(sorted(names))})\b", _HARMLESS.sub("", source)))


def _source(function: Any) -> str | None:
    try:
        return inspect.getsource(function)
    except OSError as error:
        raise_if_of_handler(error)
        return None
