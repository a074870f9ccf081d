"""Defines layers on sharded columns that need a statistic of all columns: norms, and Gemma 3n's top-k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layers import ParallelLayer
from parallelformers_ng.sharding.partition import Unit, group_runs
from parallelformers_ng.sharding.policy import Rule


class RMSNormParallel(ParallelLayer):
    """Root-mean-square norm over columns that are on several ranks (Zhang & Sennrich 2019, arXiv:1910.07467).

    y = w ⊙ x / √(ε + Σᵣ ‖xᵣ‖² / N). A norm with groups does this for each group of N columns.

    `forward` takes and returns this rank's columns `[…, columns]`, and computes in float32. With a gate of the same
    shape, as in Mamba 2 (Dao & Gu 2024, arXiv:2405.21060), silu(gate) multiplies x; with `norm_before_gate`, y.
    """

    group_count: int  # number of groups; 1 if the norm is over all columns
    group_width: int  # N, the columns of one group in the whole model
    # This rank's columns, split by groups: (start, stop, index of the group, whether this rank adds their squares).
    # If several ranks hold a column, only the first of these ranks adds its square.
    runs: Sequence[tuple[int, int, int, bool]]

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        inputs = hidden_states.to(torch.float32)
        if gate is None:
            output = self.weight * self.normalise(inputs)
        elif getattr(self, "norm_before_gate", False):
            output = self.weight * self.normalise(inputs) * nn.functional.silu(gate.to(torch.float32))
        else:
            output = self.weight * self.normalise(inputs * nn.functional.silu(gate.to(torch.float32)))
        return output.to(hidden_states.dtype)

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        """Divide this rank's columns by the root mean square of all ranks' columns; a collective."""
        squares = inputs.new_zeros(*inputs.shape[:-1], self.group_count)
        for start, stop, group, is_counted in self.runs:
            if is_counted:
                squares[..., group] += inputs[..., start:stop].pow(2).sum(-1)
        scales = torch.rsqrt(self.communicator.all_reduce(squares) / self.group_width + self.variance_epsilon)
        if self.group_count == 1:
            return inputs * scales
        scaled = [inputs[..., start:stop] * scales[..., group : group + 1] for start, stop, group, _ in self.runs]
        return torch.cat(scaled, dim=-1)


class GaussianTopKParallel(ParallelLayer):
    """Statistical top-k (You et al. 2025, arXiv:2506.06644) over columns that are on several ranks.

    y = max(0, x − μ − σ·Φ⁻¹(s)), with the mean μ and the standard deviation σ of all ranks' columns, and the fraction
    s of columns to drop, `activation_sparsity`. `forward` takes and returns this rank's columns `[…, columns]`.
    """

    width: int  # number of columns on all ranks together

    def _gaussian_topk(self, inputs: torch.Tensor) -> torch.Tensor:
        quantile = torch.special.ndtri(torch.tensor(self.activation_sparsity, device=inputs.device)).to(inputs.dtype)
        mean = self.communicator.all_reduce(inputs.sum(-1, keepdim=True)) / self.width
        variance = self.communicator.all_reduce((inputs - mean).pow(2).sum(-1, keepdim=True)) / self.width
        return nn.functional.relu(inputs - (mean + variance.sqrt() * quantile))


class HeadNormsParallel(ParallelLayer):
    """A module with a list `norms` of one norm for each head. Dimension 1 of its input has this rank's heads."""

    head_indices: Sequence[int]  # for each head of this rank, index of its norm in the list `norms`

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = hidden_states.split(1, dim=1)
        return torch.cat([self.norms[index](head) for index, head in zip(self.head_indices, heads, strict=True)], dim=1)


@dataclass(frozen=True)
class Norm(Rule):
    """Cut an RMS norm by columns; the ranks sum the squares of their columns. The norm may have groups and a gate.

    A norm over each head alone needs no rule, because every rank has whole heads.

    Args:
        unit: unit of the width, as in `Column`.
        heads: path of the `Heads` rule whose heads the width has; by default the nearest such rule above the norm.
    """

    unit: Unit = ""
    heads: str | None = None

    def apply(self, draft: Draft, path: str) -> None:
        module: Any = draft.modules[path]
        names = dict(module.named_parameters(recurse=False))
        if list(names) != ["weight"] or names["weight"].ndim != 1 or not hasattr(module, "variance_epsilon"):
            raise PolicyError(f"a {type(module).__name__} is no norm with one `weight` and a `variance_epsilon`")
        width = names["weight"].shape[0]
        ranges = draft.ranges(width, self.unit)
        draft.cut(f"{path}.weight", 0, ranges)
        count = width // module.group_size if hasattr(module, "group_size") else getattr(module, "n_groups", 1)
        runs = [{"runs": own} for own in group_runs(ranges, width // count)]
        draft.layer(path, RMSNormParallel, runs, group_count=count, group_width=width // count)


@dataclass(frozen=True)
class HeadNorms(Rule):
    """Apply each head's own norm, in a module that has a list `norms` of one norm per head. Every rank holds all norms.

    Args:
        unit: kind of the heads, "query" or "key".
    """

    unit: Literal["query", "key"] = "query"

    def apply(self, draft: Draft, path: str) -> None:
        indices = [share.key if self.unit == "key" else share.query for share in draft.heads]
        draft.layer(path, HeadNormsParallel, [{"head_indices": mine} for mine in indices])


@dataclass(frozen=True)
class GaussianTopK(Rule):
    """Compute Gemma 3n's top-k from the mean and the deviation of all ranks' columns.

    For a module whose forward calls `_gaussian_topk`."""

    def apply(self, draft: Draft, path: str) -> None:
        width = draft.attribute(draft.modules[path], "intermediate_size")
        draft.layer(path, GaussianTopKParallel, width=width)
