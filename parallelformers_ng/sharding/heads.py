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

Place = int | str  # place of a tensor in the outputs of a module: an index in a tuple or a key in a dictionary


class HeadParallel(ParallelLayer):
    """Attention over this rank's heads. Ranks exchange data only if code reads the attention weights of all heads."""

    head_sizes: Sequence[int]  # number of query heads of each rank, 0 for a rank without heads
    # outputs with a dimension of heads: the path of places to each output, and that dimension
    weights_at: Sequence[tuple[tuple[Place, ...], int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] == sum(self.head_sizes) > 1:
            kwargs["attention_mask"] = self.own_heads(mask, 1)
        args = tuple(map(own_part, args))
        output = super().forward(*args, **{name: own_part(value) for name, value in kwargs.items()})
        for place, dim in self.weights_at:
            output = replaced(output, place, partial(self.shown, dim=dim))
        return output

    def own_heads(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view of this rank's heads along the dimension of all heads."""
        return heads_of(whole, dim, self.head_sizes, self.communicator.rank)

    def shown(self, weights: torch.Tensor, dim: int, change: Callable[[torch.Tensor], Any] | None = None) -> Any:
        """Return attention weights in the shape of all heads; ranks gather all heads only if code reads the result.

        The result is an `OwnHeads`. In compiled code it is the gathered tensor, with the errors of
        `Communicator.all_gather`.
        """
        if weights.ndim < 4 or weights.shape[dim] != max(1, self.head_sizes[self.communicator.rank]):
            return weights

        def gather() -> torch.Tensor:
            own = weights.narrow(dim, 0, self.head_sizes[self.communicator.rank])  # without a copied head
            whole = self.communicator.all_gather(own, dim, self.head_sizes)
            return whole if change is None else change(whole)

        if is_compiling():
            return gather()  # the compiler removes results that no code reads
        return OwnHeads(weights, dim, self.head_sizes, gather)


class BiasedHeadParallel(HeadParallel):
    """Attention over this rank's heads with a bias that the model makes for all heads: b ↦ b[heads of this rank].

    `forward` raises PolicyError if a call lacks the keyword argument of such a bias. The bias itself may be None.
    """

    # keyword arguments of the forward that hold such a bias, `[batch, heads or 1, …, keys]` of four or more dimensions,
    # or `[batch · heads, …, keys]` of three
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
    """Attention that merges its heads to the width of its input: `merged.view(batch, length, hidden.size(-1))`.

    On a rank the merged heads are narrower than the input. A view of the merged heads to the input's width is changed
    to a view to the merged width.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        width, own = hidden.shape[-1], max(1, self.head_sizes[self.communicator.rank])
        with _NarrowedViews(width, width // sum(self.head_sizes) * own):
            return super().forward(*args, **kwargs)


class _NarrowedViews(TorchFunctionMode):
    """Mode that changes a view to `whole` columns into a view to `own` columns if the tensor's size fits only `own`."""

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
    """Mark a module as attention: layers beneath it are cut by whole heads.

    Attribute names are relative to the module; `config.x` is read from the module's configuration. A count in the
    configuration stays unchanged on the ranks unless `scaled` or `scaled_key` names it.

    Args:
        query: attribute that holds the number of query heads.
        key: attribute that holds the number of key/value heads; "" if `groups` gives that number, or if it equals the
            number of query heads.
        groups: attribute that holds the number of query heads per key/value head; "" if there is no such attribute.
        scaled: further attributes, proportional to the query heads, that the forward reads (`embed_dim`, …).
        scaled_key: further attributes, proportional to the key/value heads, that the forward reads.
        weights: place of the attention weights in the module's outputs: an index, a key, or a tuple of these for
            nested outputs; None if the module does not return weights.
        weights_dim: dimension of heads in the attention weights.
        more_weights: further outputs with a dimension of heads, as `(place, dimension)`.
        biases: keyword arguments of the forward with values for all heads of the model, made outside the module
            (ALiBi). Each rank takes the values of its heads: dimension 1 of a tensor of four or more dimensions,
            dimension 0 (batch × heads) of three.
        fresh: attributes that keep a state of all heads from call to call; each rank begins with None.
        input_width: whether the forward takes the width of its merged heads from its input, not from an attribute.
        layer: parallel layer for an attention whose own forward cannot compute a part of the heads.
    """

    query: str
    key: str = ""
    groups: str = ""
    scaled: tuple[str, ...] = ()
    scaled_key: tuple[str, ...] = ()
    weights: Place | tuple[Place, ...] | None = 1
    weights_dim: int = 1
    more_weights: tuple[tuple[Place | tuple[Place, ...], int], ...] = ()
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
        places = [(at if isinstance(at, tuple) else (at,), dim) for at, dim in weights if at is not None]
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
        draft.layer(path, cls, local, head_sizes=sizes, weights_at=tuple(places), **shared)


@dataclass(frozen=True)
class Renewed(Rule):
    """Mark a module that may replace its attention while it runs (`set_attention_type`). The new attention gets the
    same heads of this rank.

    Args:
        attention: name of the child that is replaced. The plan has a `Heads` rule for this child before this rule.
    """

    attention: str

    def apply(self, draft: Draft, path: str) -> None:
        (carried,) = (layer for layer in draft.layers.values() if layer.path == f"{path}.{self.attention}")
        draft.layer(path, RenewedAttention, carried=(*carried.attributes[0], "communicator"))


class RenewedAttention(ParallelLayer):
    """A module that changes between full and sparse attention by making a new attention around the same layers."""

    # attributes to copy to the new attention: numbers of heads, and the attributes of `HeadParallel`
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
    """Return this rank's attention weights from an `OwnHeads`; return any other value unchanged."""
    return value.own if type(value) is OwnHeads else value


def replaced(output: Any, place: Sequence[Place], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the outputs with `change` applied to the tensor at `place`.

    If `place` has no tensor, the result is `output` itself.
    """
    step: Any
    step, *rest = place
    known = step in output if isinstance(output, dict) else isinstance(output, (list, tuple)) and step < len(output)
    if not known:
        return output
    before = part = output[step]
    if rest:
        part = replaced(part, rest, change)
    elif isinstance(part, torch.Tensor):
        part = change(part)
    if part is before:
        return output
    if isinstance(output, dict):
        return {**output, step: part}
    items = [*output[:step], part, *output[step + 1 :]]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def _set_on_ranks(counted_by: str, scaled: tuple[str, ...]) -> tuple[str, ...]:
    """Return the attributes to set per rank. A count in the configuration is set only if the policy lists it as
    scaled."""
    return scaled if not counted_by or counted_by.startswith("config.") else (counted_by, *scaled)
