"""Cuts leftovers: large parameters that no policy names. Both ways to cut a leftover are correct in any model.

If the modelling code only calls a layer, with the same inputs on all ranks, the layer is cut by columns, and its
outputs are gathered. Any other leftover is sharded and gathered at every read.
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
from parallelformers_ng.sharding.structure import Place, dim_of_outputs, places, uses
from parallelformers_ng.sharding.tensors import dotted, is_within

# Replicated parameters make a rank's memory larger than an equal share of the model. Cutting stops once they add at
# most 2 % to that share.
_MAX_EXCESS = 0.02
# A kind of parameter with less than 0.15 % of the model's bytes stays whole: its collectives would cost too much time.
_MIN_KIND = 0.0015
# Recurrent layers (LSTM) stay whole if replicated parameters add at most 15 % to a rank's share, because a decoder
# would gather a recurrent layer for every token.
_MAX_EXCESS_BY_RNN = 0.15


# A parameter that no rule has cut: path of its module, its name in the module, and the parameter itself.
_Leftover = tuple[str, str, nn.Parameter]


def cut_leftovers(draft: Draft, exhaustive: bool) -> None:
    """Cut parameters of two or more dimensions that no policy cut, except tied parameters.

    Parameters that differ only in the number of their layer are of one kind. The kind with the most bytes is cut
    first. `exhaustive` also cuts small kinds.
    """
    where, used = places(draft.model), uses(draft.model)
    parameters: list[_Leftover] = [
        (path, name, parameter)
        for path, module in draft.modules.items()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    uncut = [each for each in parameters if dotted(*each[:2]) not in draft.cuts]
    whole, total = _bytes_of(uncut), max(1, _bytes_of(parameters))
    kinds: dict[tuple[str, str, str], list[_Leftover]] = {}
    for path, name, parameter in uncut:
        if parameter.ndim >= 2 and used[id(parameter)] == 1:
            kind = (where[path].block, re.sub(r"\d+", "*", where[path].path), re.sub(r"\d+", "*", name))
            kinds.setdefault(kind, []).append((path, name, parameter))
    # paths of the blocks and models in which each rank computes a different part of a result
    uneven = {_instance(layer.path, where) for layer in draft.layers.values() if layer.gives_part}
    smallest = min(draft.parts, default=1 / draft.world_size)
    for leftovers in sorted(kinds.values(), key=_bytes_of, reverse=True):
        excess = whole * (1 / smallest - 1) / total
        if not exhaustive and (excess <= _MAX_EXCESS or _bytes_of(leftovers) < _MIN_KIND * total):
            break
        if not exhaustive and isinstance(draft.modules[leftovers[0][0]], nn.RNNBase) and excess <= _MAX_EXCESS_BY_RNN:
            continue
        for path, name, parameter in leftovers:
            gets_whole = not uneven & set(_instances_above(path, draft, where))
            whole -= parameter.nbytes if _cut(draft, path, name, parameter, gets_whole) else 0


def _bytes_of(parameters: list[_Leftover]) -> int:
    return sum(parameter.nbytes for _, _, parameter in parameters)


def _cut(draft: Draft, path: str, name: str, parameter: nn.Parameter, gets_whole: bool) -> bool:
    """Cut one parameter; return False if it stays whole, because it is too small or code may write to it.

    `gets_whole` says whether the parameter's module gets the same inputs on all ranks.
    """
    module = draft.modules[path]
    draft.rule, draft.counter, draft.heads = "leftover", None, ()
    looks_up = isinstance(module, nn.Embedding) and not renormalizes(module)
    readers = (draft.modules[other] for other in draft.foreign if is_within(path, other))
    is_plain = not foreign_layer(module) and not any("weight" in names_of(reader) for reader in readers)
    multiplies = type(module) in (nn.Linear, Conv1D, *CONVOLUTIONS) and getattr(module, "groups", 1) == 1
    called = name == "weight" and is_plain and is_only_called(draft.model, path)
    is_wide = parameter.shape[dim_of_outputs(module)] >= draft.world_size
    if called and is_wide and (looks_up or (multiplies and gets_whole)):
        Column("column", gather=True).apply(draft, path)
        return True
    dim = next((dim for dim, size in enumerate(parameter.shape) if size >= draft.world_size), None)
    above = (other for other in draft.modules if is_within(path, other))
    if dim is None or renormalizes(module) or any(may_write(draft.modules[other], name) for other in above):
        return False  # code that writes to the parameter would change only this rank's rows
    store(draft, path, name, dim)
    return True


def _instances_above(path: str, draft: Draft, where: dict[str, Place]) -> Iterator[str]:
    """Yield the paths of the repeated blocks that contain a module, innermost first, up to its `PreTrainedModel`."""
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
