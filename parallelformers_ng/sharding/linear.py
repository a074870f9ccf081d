"""Cuts linear layers, convolutions and embeddings by their outputs (`Column`) or by their inputs (`Row`).

                    column-parallel                  row-parallel
    x ──────► [A₀] ──► y₀ ─► …nonlinearity… ─► [B₀] ──► z₀ ─┐
    x ──────► [A₁] ──► y₁ ─► …nonlinearity… ─► [B₁] ──► z₁ ─┴─ Σ ─► z       (Megatron-LM, arXiv:1909.08053, §3)

A layer cut by its outputs needs no class of its own: it is the same layer with fewer outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layer_uses import CONVOLUTIONS
from parallelformers_ng.sharding.layers import ParallelLayer
from parallelformers_ng.sharding.partition import Part, Unit, group_runs, width_of
from parallelformers_ng.sharding.policy import Rule


@dataclass(frozen=True)
class Column(Rule):
    """Cut a layer by its outputs: each rank computes a part of the outputs, and ranks exchange nothing.

    Args:
        unit: unit of the outputs; "key" is the unit of key and value projections in a model with fewer key/value
            heads than query heads.
        fused: projections packed side by side along the output. A number means that many equal parts (`gate|up` is 2,
            `q|k|v` is 3); a tuple names each part's unit (`("query", "key", "key")` for q|k|v with fewer k/v heads).
            Each part is cut separately. A part whose heads have another width is a `Part`. Projections interleaved
            *per head* (Bloom) are one part, because each head is contiguous.
        interleaved: projections packed within the group of each key/value head. `("query", "key", "key")` means: for
            each group its query heads, its key head, its value head (Falcon; multi-query attention has one group).
        heads: path of the `Heads` rule whose heads this layer computes; by default the nearest such rule above it.
        gather: whether to gather the outputs of all ranks, for code that needs all outputs of the layer.
        gather_inputs: whether to gather the layer's inputs first, if they are the outputs of another cut layer.
        widths: attributes of the parent module that equal the number of outputs, such as `conv_dim`, and that the
            parent's forward reads.
    """

    unit: Unit = ""
    fused: int | tuple[Unit | Part, ...] = 1
    interleaved: tuple[Unit | Part, ...] = ()
    heads: str | None = None
    gather: bool = False
    gather_inputs: bool = False
    widths: tuple[str, ...] = ()

    def apply(self, draft: Draft, path: str) -> None:
        module: Any = draft.modules[path]
        if hasattr(module, "group_out_dim"):
            return _cut_groups(draft, path)
        dim, size_names = _geometry(module, of_inputs=False)
        size = module.weight.shape[dim]
        ranges = draft.ranges(size, self.unit, self.fused, self.interleaved)
        draft.cut(f"{path}.weight", dim, ranges)
        if getattr(module, "bias", None) is not None:
            draft.cut(f"{path}.bias", 0, ranges)
        widths = tuple(map(width_of, ranges))
        if getattr(module, "groups", 1) > 1 and not _is_depthwise(module):
            runs = group_runs(ranges, size // module.groups)
            draft.layer(path, GroupedColumnParallel, [{"runs": own} for own in runs])
        if self.gather_inputs:
            if not draft.heads:
                raise PolicyError("gathers inputs that are counted in heads, but no rule above it is Heads(...)")
            inputs = draft.ranges(module.weight.shape[1 - dim], self.unit)
            sizes = [0 if share.idle else width_of(own) for share, own in zip(draft.heads, inputs, strict=True)]
            draft.layer(path, GatheredInput, input_sizes=tuple(sizes))
        attributes = [dict.fromkeys(size_names, width) for width in widths]
        if not self.gather:
            draft.layer(path, None, attributes)
        elif sum(widths) != size:
            raise PolicyError("outputs that ranks hold twice cannot be gathered")
        else:
            channel_dim = 1 - module.weight.ndim if isinstance(module, CONVOLUTIONS) else -1
            draft.layer(path, GatheredColumnParallel, attributes, gathered_sizes=widths, gathered_dim=channel_dim)
        if self.widths:
            owner = path.rpartition(".")[0]
            for name in self.widths:
                draft.attribute(draft.modules[owner], name)  # raises PolicyError if the parent has no such attribute
            draft.layer(owner, None, [dict.fromkeys(self.widths, width) for width in widths])


@dataclass(frozen=True)
class Row(Rule):
    """Cut a layer by its inputs; the ranks sum their partial outputs. Only rank 0 holds the bias, so that the sum has
    the bias once.

    Args:
        unit: unit of the inputs, as in `Column`.
        fused: parts packed side by side along the input, as in `Column`.
        heads: path of the `Heads` rule whose heads this layer reads; by default the nearest such rule above it.
        reduce: whether to sum the partial outputs in this layer. False if a later `Reduce` rule sums several layers at
            once.
    """

    unit: Unit = ""
    fused: int | tuple[Unit, ...] = 1
    heads: str | None = None
    reduce: bool = True

    def apply(self, draft: Draft, path: str) -> None:
        module: Any = draft.modules[path]
        dim, size_names = _geometry(module, of_inputs=True)
        ranges = draft.ranges(module.weight.shape[dim], self.unit, self.fused)
        idle = [share.idle for share in draft.heads]
        draft.cut(f"{path}.weight", dim, ranges, idle)
        if getattr(module, "bias", None) is not None:
            draft.cut_on_first_rank(f"{path}.bias")
        sizes = [dict.fromkeys(size_names, width_of(own)) for own in ranges]
        draft.layer(path, RowParallel if self.reduce else None, sizes)


@dataclass(frozen=True)
class Slice(Rule):
    """Cut a parameter or buffer that belongs to no layer of its own, along one dimension; ranks exchange nothing.

    Args:
        dim: the dimension to cut; a negative number counts from the last dimension.
        unit: unit of that dimension, as in `Column`.
        fused: parts packed along that dimension, as in `Column`; or the name of an attribute that holds the number of
            parts, in the module with the `Heads` rule.
        heads: path of the `Heads` rule whose heads the dimension has; by default the nearest such rule above it.
        partial: whether the tensor's products are summed over the ranks. If True, a rank without heads holds zeros.
    """

    dim: int
    unit: Unit = ""
    fused: int | str | tuple[Unit | Part, ...] = 1
    heads: str | None = None
    partial: bool = False

    def finds(self, draft: Draft, path: str) -> bool:
        return draft.tensor(path) is not None

    def apply(self, draft: Draft, path: str) -> None:
        tensor: Any = draft.tensor(path)
        if not -tensor.ndim <= self.dim < tensor.ndim:
            raise PolicyError(f"has {tensor.ndim} dimensions, so there is no dimension {self.dim}")
        dim = self.dim % tensor.ndim
        fused = draft.counted(self.fused) if isinstance(self.fused, str) else self.fused
        ranges = draft.ranges(tensor.shape[dim], self.unit, fused)
        idle = [self.partial and share.idle for share in draft.heads]
        draft.cut(path, dim, ranges, idle)


@dataclass(frozen=True)
class Reduce(Rule):
    """Sum a module's output over the ranks, if the cut layers in the module return partial sums."""

    def apply(self, draft: Draft, path: str) -> None:
        draft.layer(path, Reduced)


@dataclass(frozen=True)
class Gather(Rule):
    """Gather a module's outputs, if the module multiplies by the weight of a cut layer without calling that layer.

    Args:
        layer: path of that layer beneath the module.
    """

    layer: str

    def apply(self, draft: Draft, path: str) -> None:
        layer = draft.modules.get(f"{path}.{self.layer}")
        if layer is None or not hasattr(layer, "weight"):
            raise PolicyError(f"has no layer {self.layer!r} with a weight")
        widths = tuple(map(width_of, draft.ranges(layer.weight.shape[0])))
        draft.layer(path, GatheredColumnParallel, gathered_sizes=widths)


class Reduced(ParallelLayer):
    """A module whose output is summed over the ranks; if the module returns a tuple, the first item is summed."""

    takes_part = False
    gives_part = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, total = super().forward(*args, **kwargs), self.communicator.all_reduce
        return (total(output[0]), *output[1:]) if isinstance(output, tuple) else total(output)


class RowParallel(Reduced):
    """A layer cut by its inputs: z = Σᵣ yᵣ Bᵣ + b. Only rank 0 holds the bias b, so that the sum has b once."""

    takes_part = True


class GatheredColumnParallel(ParallelLayer):
    """A layer that computes this rank's outputs and gathers the outputs of all ranks: z = [x A₀ | x A₁ | …]."""

    takes_part = False
    gives_part = False
    gathered_sizes: Sequence[int]  # number of outputs that each rank computes
    gathered_dim: int = -1  # dimension along which outputs are gathered; for a convolution, that of its channels

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        part = super().forward(*args, **kwargs)
        return self.communicator.all_gather(part, self.gathered_dim, self.gathered_sizes)


class GatheredInput(ParallelLayer):
    """A layer that gathers the inputs of all ranks, then computes this rank's outputs: zᵣ = [x₀ | x₁ | …] Aᵣ."""

    # number of inputs that each rank contributes; 0 for an idle rank, whose copy of head 0 must not be counted
    input_sizes: Sequence[int]

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        own = part.narrow(-1, 0, self.input_sizes[self.communicator.rank])
        return super().forward(self.communicator.all_gather(own, -1, self.input_sizes))


class GroupedColumnParallel(ParallelLayer):
    """A grouped 1-D convolution of which each rank computes some output channels.

    `forward` takes all input channels, `[batch, channels, length]`, and returns the output channels of this rank.
    """

    takes_part = False
    runs: Sequence[tuple[int, int, int, bool]]  # this rank's output channels, split by groups as `group_runs` does

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        counts = [stop - start for start, stop, *_ in self.runs]
        biases = [None] * len(counts) if self.bias is None else self.bias.split(counts)
        inputs = states.unflatten(1, (self.groups, -1))
        outputs = [
            nn.functional.conv1d(inputs[:, group], weight, bias, self.stride, self.padding, self.dilation)
            for (_, _, group, _), weight, bias in zip(self.runs, self.weight.split(counts), biases, strict=True)
        ]
        return torch.cat(outputs, dim=1) if outputs else states[:, :0]


def _cut_groups(draft: Draft, path: str) -> None:
    """Cut the outputs of a grouped linear layer, whose weight is `[groups, in, out]`; every group is cut alike."""
    module: Any = draft.modules[path]
    ranges = draft.ranges(module.group_out_dim)
    draft.cut(f"{path}.weight", 2, ranges)
    draft.cut(f"{path}.bias", 0, draft.ranges(module.output_size, fused=module.num_groups))
    widths = map(width_of, ranges)
    draft.layer(path, None, [{"group_out_dim": each, "output_size": each * module.num_groups} for each in widths])


def _is_linear(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) or (weight is not None and weight.ndim == 2 and hasattr(module, "in_features"))


def _is_depthwise(module: Any) -> bool:
    """Return whether a module is a 1-D convolution that filters every channel alone."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def _stacks_linears(module: nn.Module) -> bool:
    """Return whether a module stacks the linear layers of several experts in one weight `[experts, out, in]`."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 3 and hasattr(module, "input_size") and hasattr(module, "output_size")


# The inputs or the outputs of a layer: their dimension in the weight, and the attributes that hold their number.
_Side = tuple[int, tuple[str, ...]]
# Kinds of layers that can be cut: (test for the kind, outputs, inputs). None: the layer cannot be cut by that side.
_KINDS: tuple[tuple[Callable[[Any], bool], _Side | None, _Side | None], ...] = (
    (_is_linear, (0, ("out_features",)), (1, ("in_features",))),
    (_is_depthwise, (0, ("in_channels", "out_channels", "groups")), None),
    (lambda each: isinstance(each, nn.Conv1d) and each.groups == 1, (0, ("out_channels",)), (1, ("in_channels",))),
    (lambda each: isinstance(each, CONVOLUTIONS), (0, ("out_channels",)), None),
    (lambda each: isinstance(each, Conv1D), (1, ("nf",)), (0, ("nx",))),
    (lambda each: isinstance(each, nn.Embedding), (1, ("embedding_dim",)), None),
    (lambda each: hasattr(each, "group_in_dim"), None, (1, ("group_in_dim",))),
    (_stacks_linears, (1, ("output_size",)), (2, ("input_size",))),
)
_BY_INPUTS = "rows (a Linear, Conv1D or ungrouped Conv1d can)"
_BY_OUTPUTS = "columns (a Linear, Conv1D, Embedding or convolution can)"


def _geometry(module: nn.Module, of_inputs: bool) -> _Side:
    """Return the dimension of inputs or outputs in a module's weight, and the attributes that hold their number."""
    side = next((inputs if of_inputs else outputs for fits, outputs, inputs in _KINDS if fits(module)), None)
    if side is None:
        raise PolicyError(cannot_cut(module, _BY_INPUTS if of_inputs else _BY_OUTPUTS))
    return side


def cannot_cut(module: nn.Module, cut: str) -> str:
    """Return the error message for a module that a rule cannot cut: "a Conv2d cannot be cut by {cut}"."""
    if hasattr(module, "base_layer"):
        return f"a {type(module).__name__} is an adapter; merge it into the weights first (merge_and_unload)"
    return f"a {type(module).__name__} cannot be cut by {cut}"
