"""Cuts the large parameters that no policy names, in two ways that are correct in any model.

A layer that the modelling code only calls, with the same inputs on all ranks, is cut by columns, and its outputs are
gathered. Any other parameter is sharded, and gathered at every read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.live_code.self_changes import may_write, renormalizes
from parallelformers_ng.live_code.stock import foreign_layer, names_of
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layer_uses import CONVOLUTIONS, is_only_called
from parallelformers_ng.sharding.linear import Column
from parallelformers_ng.sharding.stored import store
from parallelformers_ng.sharding.structure import Place, places, uses
from parallelformers_ng.sharding.tensors import dotted, is_within

# Fraction of a rank's share: cutting stops once replicated parameters add no more than this fraction to the share.
_ENOUGH = 0.02
# Fraction of all bytes: a kind of parameter with less stays whole, because its collectives would cost too much.
_WORTH = 0.0015
# Fraction of a rank's share: recurrent layers are sharded only if replicated parameters add more than this fraction.
# A recurrent layer of a decoder is gathered for every token.
_MUCH = 0.15


# A parameter that no rule has cut: path of its module, its name in the module, and the parameter.
_Leftover = tuple[str, str, nn.Parameter]


def cut_leftovers(draft: Draft, exhaustive: bool) -> None:
    """Cut parameters of two or more dimensions that no policy cut, kind by kind, first the kind with the most bytes.

    Tied parameters stay whole.
    """
    where = places(draft.model)
    kinds, whole, total = _leftovers(draft, where)
    # blocks and models in which ranks compute different parts of a result
    uneven = {_instance(layer.path, where) for layer in draft.layers.values() if layer.gives_part}
    smallest = min(draft.parts, default=1 / draft.world_size)
    for kind in sorted(kinds, key=_bytes_of, reverse=True):
        size = _bytes_of(kind)
        excess = whole * (1 / smallest - 1) / max(1, total)
        if not exhaustive and (excess <= _ENOUGH or size < _WORTH * total):
            break
        if not exhaustive and isinstance(draft.modules[kind[0][0]], nn.RNNBase) and excess <= _MUCH:
            continue
        for path, name, parameter in kind:
            gets_whole = not uneven & set(_instances_above(path, draft, where))
            whole -= parameter.nbytes if _cut(draft, path, name, parameter, gets_whole) else 0


def _bytes_of(kind: list[_Leftover]) -> int:
    return sum(parameter.nbytes for _, _, parameter in kind)


def _leftovers(draft: Draft, where: dict[str, Place]) -> tuple[list[list[_Leftover]], int, int]:
    """Return the cuttable parameters by kind, the bytes of all uncut parameters, and the bytes of all parameters."""
    used = uses(draft.model)
    kinds: dict[tuple[str, str, str], list[_Leftover]] = {}
    whole = total = 0
    for path, module in draft.modules.items():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            total += parameter.nbytes
            if dotted(path, name) in draft.cuts:
                continue
            whole += parameter.nbytes
            if parameter.ndim < 2 or used[id(parameter)] > 1:
                continue
            kind = (where[path].block, re.sub(r"\d+", "*", where[path].path), re.sub(r"\d+", "*", name))
            kinds.setdefault(kind, []).append((path, name, parameter))
    return list(kinds.values()), whole, total


def _cut(draft: Draft, path: str, name: str, parameter: nn.Parameter, gets_whole: bool) -> bool:
    """Cut one parameter; return False if each of its dimensions is smaller than the number of ranks."""
    module = draft.modules[path]
    draft.who, draft.counter = f"leftover on {path}", None
    outputs = 0 if not isinstance(module, (nn.Embedding, Conv1D)) else 1
    looks_up = isinstance(module, nn.Embedding) and not renormalizes(module)
    is_plain = not foreign_layer(module) and not _owner_is_foreign(draft, path)
    multiplies = type(module) in (nn.Linear, Conv1D, *CONVOLUTIONS) and getattr(module, "groups", 1) == 1
    called = name == "weight" and is_plain and is_only_called(draft.model, path)
    if called and (looks_up or (multiplies and gets_whole)) and parameter.shape[outputs] >= draft.world_size:
        Column("column", gather=True).apply(draft, path, [])
        return True
    dim = next((dim for dim, size in enumerate(parameter.shape) if size >= draft.world_size), None)
    above = (other for other in draft.modules if is_within(path, other))
    if dim is None or renormalizes(module) or any(may_write(draft.modules[other], name) for other in above):
        return False  # a rank could write only to its own rows
    store(draft, path, name, dim)
    return True


def _owner_is_foreign(draft: Draft, path: str) -> bool:
    return any(is_within(path, other) and "weight" in names_of(draft.modules[other]) for other in draft.foreign)


def _instances_above(path: str, draft: Draft, where: dict[str, Place]) -> Iterator[str]:
    """Yield the paths of the blocks around a module, innermost first; the path of its model if no block is around."""
    while True:
        path = _instance(path, where)
        yield path
        if not path or isinstance(draft.modules[path], PreTrainedModel):
            return
        path = path.rpartition(".")[0]
        if isinstance(draft.modules[_instance(path, where)], PreTrainedModel):
            return


def _instance(path: str, where: dict[str, Place]) -> str:
    return path.removesuffix(where[path].path).removesuffix(".")
