"""Cuts attention: each rank computes whole query heads, and the key/value heads that its query heads read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layers import ParallelLayer, parallel_class
from parallelformers_ng.sharding.own_heads import OwnHeads, heads_of
from parallelformers_ng.sharding.policy import Rule

OutputKey = int | str  # selects one output of a module: an index of a tuple, or a key of a dictionary


class HeadParallel(ParallelLayer):
    """Attention over this rank's heads. Ranks gather attention weights of all heads only if code reads the weights."""

    head_sizes: Sequence[int]  # number of query heads of each rank; 0 if there are fewer heads than ranks
    # For each output that has a dimension of heads: the keys that lead to the output, and that dimension.
    weights_at: Sequence[tuple[tuple[OutputKey, ...], int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] == sum(self.head_sizes) > 1:
            kwargs["attention_mask"] = self.own_heads(mask, 1)
        args = tuple(map(own_part, args))
        output = super().forward(*args, **{name: own_part(value) for name, value in kwargs.items()})
        for keys, dim in self.weights_at:
            output = replaced(output, keys, partial(self.shown, dim=dim))
        return output

    def own_heads(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's heads of a tensor that has all heads in dimension `dim`, as a view."""
        return heads_of(whole, dim, self.head_sizes, self.communicator.rank)

    def shown(self, weights: torch.Tensor, dim: int, change: Callable[[torch.Tensor], Any] | None = None) -> Any:
        """Return the attention weights of all heads, as an `OwnHeads`, which ranks gather when code first reads it.

        In compiled code, return the gathered tensor itself. `change` is applied to the gathered weights.
        """
        if weights.ndim < 4 or weights.shape[dim] != max(1, self.head_sizes[self.communicator.rank]):
            return weights

        def gather() -> torch.Tensor:
            own = weights.narrow(dim, 0, self.head_sizes[self.communicator.rank])  # drops an idle rank's copy of head 0
            whole = self.communicator.all_gather(own, dim, self.head_sizes)
            return whole if change is None else change(whole)

        if is_compiling():
            return gather()  # the compiler removes results that no code reads
        return OwnHeads(weights, dim, self.head_sizes, gather)


class BiasedHeadParallel(HeadParallel):
    """Attention that gets a bias for all heads, such as ALiBi, from the model, and uses the slice of this rank's heads.

    `forward` raises PolicyError if a call lacks a keyword argument of `bias_names`. Its value may be None.
    """

    # Keyword arguments of the forward that hold a bias of all heads: `[batch, heads or 1, …, keys]` if it has four or
    # more dimensions, `[batch · heads, …, keys]` if it has three.
    bias_names: Sequence[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name in self.bias_names:
            if name not in kwargs:
                raise PolicyError(f"{type(self).__name__}: bias {name!r} is not among the arguments {sorted(kwargs)}")
            if kwargs[name] is not None:
                kwargs[name] = self._own_part(kwargs[name])
        return super().forward(*args, **kwargs)

    def _own_part(self, bias: torch.Tensor) -> torch.Tensor:
        if bias.ndim >= 4:
            return bias if bias.shape[1] == 1 else self.own_heads(bias, 1)
        return self.own_heads(bias.unflatten(0, (-1, sum(self.head_sizes))), 1).flatten(0, 1)


class NarrowedHeadParallel(BiasedHeadParallel):
    """Attention that reshapes its merged heads to the width of its input, which is too wide on a rank.

    `forward` makes such a view narrower: `merged.view(batch, length, hidden.size(-1))`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        width, own = hidden.shape[-1], max(1, self.head_sizes[self.communicator.rank])
        with _NarrowedViews(width, width // sum(self.head_sizes) * own):
            return super().forward(*args, **kwargs)


class _NarrowedViews(TorchFunctionMode):
    """Mode in which `view(…, whole)` and `reshape(…, whole)` give `own` columns, if the tensor has only so many."""

    def __init__(self, whole: int, own: int) -> None:
        super().__init__()
        self.whole = whole
        self.own = own

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.view, torch.Tensor.reshape) and not kwargs:
            tensor, *size = args
            shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)
            if shape and shape[-1] == self.whole and tensor.numel() == math.prod(shape[:-1]) * self.own:
                args = (tensor, (*shape[:-1], self.own))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Heads(Rule):
    """Mark a module as attention, so that rules for layers beneath it cut by whole heads.

    Arguments name attributes of the module; `config.x` is an attribute of the module's configuration. A count in the
    configuration stays unchanged on the ranks unless `scaled` or `scaled_key` names it.

    Args:
        query: attribute that holds the number of query heads.
        key: attribute that holds the number of key/value heads; "" if `groups` gives that number, or if it equals the
            number of query heads.
        groups: attribute that holds the number of query heads per key/value head; "" if there is no such attribute.
        scaled: further attributes, proportional to the query heads, that the forward reads (`embed_dim`, …).
        scaled_key: further attributes, proportional to the key/value heads, that the forward reads.
        weights: index or key of the attention weights in the module's outputs, or a tuple of indices and keys for
            nested outputs; None if the module does not return weights.
        weights_dim: dimension of heads in the attention weights.
        more_weights: further outputs with a dimension of heads, each as `(index or key, dimension)`.
        biases: keyword arguments of the forward in which the model passes values for all heads (ALiBi). Each rank
            takes the values of its heads: dimension 1 of a tensor of four or more dimensions, dimension 0
            (batch × heads) of three.
        fresh: attributes that keep a state of all heads from call to call; each rank begins with None.
        input_width: whether the forward takes the width of its merged heads from its input, not from an attribute.
        layer: parallel layer for an attention whose own forward cannot compute a part of the heads.
    """

    query: str
    key: str = ""
    groups: str = ""
    scaled: tuple[str, ...] = ()
    scaled_key: tuple[str, ...] = ()
    weights: OutputKey | tuple[OutputKey, ...] | None = 1
    weights_dim: int = 1
    more_weights: tuple[tuple[OutputKey | tuple[OutputKey, ...], int], ...] = ()
    biases: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    input_width: bool = False
    layer: type[HeadParallel] | None = None

    def count(self, draft: Draft, module: nn.Module) -> tuple[int, int]:
        query = draft.attribute(module, self.query)
        if self.key:
            return query, draft.attribute(module, self.key)
        return query, query // draft.attribute(module, self.groups) if self.groups else query

    def apply(self, draft: Draft, path: str) -> None:
        module = draft.modules[path]
        query, key = self.count(draft, module)
        cls = self.layer or (
            NarrowedHeadParallel if self.input_width else BiasedHeadParallel if self.biases else HeadParallel
        )
        weights = ((self.weights, self.weights_dim), *self.more_weights)
        outputs = [(keys if isinstance(keys, tuple) else (keys,), dim) for keys, dim in weights if keys is not None]
        local: list[dict[str, Any]] = []
        for share in draft.heads:
            counts = dict.fromkeys(_set_on_ranks(self.key, self.scaled_key), (len(share.key), key))
            counts |= dict.fromkeys(_set_on_ranks(self.query, self.scaled), (len(share.query), query))
            mine = {name: draft.scale(module, name, *own_and_all) for name, own_and_all in counts.items()}
            if self.groups:
                mine[self.groups] = share.groups
            local.append(mine)
        sizes = tuple(0 if share.idle else len(share.query) for share in draft.heads)
        shared: dict[str, Any] = dict.fromkeys(self.fresh)
        if issubclass(cls, BiasedHeadParallel):
            shared["bias_names"] = self.biases
        draft.layer(path, cls, local, head_sizes=sizes, weights_at=tuple(outputs), **shared)


@dataclass(frozen=True)
class Renewed(Rule):
    """Mark a module that may replace its attention at run time, as BigBird does (`set_attention_type`).

    Args:
        attention: name of the child that is replaced. The plan must have a `Heads` rule for it before this rule.
    """

    attention: str

    def apply(self, draft: Draft, path: str) -> None:
        (carried,) = (layer for layer in draft.layers.values() if layer.path == f"{path}.{self.attention}")
        draft.layer(path, RenewedAttention, carried=(*carried.attributes[0], "communicator"))


class RenewedAttention(ParallelLayer):
    """A module that changes between full and sparse attention by making a new attention module for the same layers."""

    # Names of attributes that the new attention gets from the old one: numbers of heads, and those of `HeadParallel`.
    carried: Sequence[str]

    def set_attention_type(self, *args: Any, **kwargs: Any) -> None:
        before = self.self
        super().set_attention_type(*args, **kwargs)  # type: ignore[misc]
        after: Any = self.self
        cls: type = type(after)
        if after is not before:
            after.__class__ = parallel_class(HeadParallel, cls)
            for name in self.carried:
                setattr(after, name, getattr(before, name))


def own_part(value: Any) -> Any:
    """Return the attention weights of this rank's heads if `value` is an `OwnHeads`; otherwise return `value`."""
    return value.own if type(value) is OwnHeads else value


def replaced(output: Any, keys: Sequence[OutputKey], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of nested outputs with `change` applied to the tensor at `output[keys[0]][keys[1]]…`.

    If there is no tensor, the result is `output` itself.
    """
    key: Any
    key, *rest = keys
    known = key in output if isinstance(output, dict) else isinstance(output, (list, tuple)) and key < len(output)
    if not known:
        return output
    before = part = output[key]
    if rest:
        part = replaced(part, rest, change)
    elif isinstance(part, torch.Tensor):
        part = change(part)
    if part is before:
        return output
    if isinstance(output, dict):
        return {**output, key: part}
    items = [*output[:key], part, *output[key + 1 :]]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def _set_on_ranks(counted_by: str, scaled: tuple[str, ...]) -> tuple[str, ...]:
    """Return the attributes to set on each rank: `scaled`, and the count `counted_by` unless a configuration has it."""
    return scaled if not counted_by or counted_by.startswith("config.") else (counted_by, *scaled)
