"""Defines sharded layers that need a statistic of all columns: norms, and top-k by mean and deviation."""

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
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) over a cut width, or over each group g of
    columns; a group may be on several ranks:

        y = w ⊙ x / √(ε + Σᵣ ‖xᵣ,g‖² / N)

    `forward` takes and returns this rank's columns `[…, columns]`, and computes in float32. With a gate of the same
    shape, as in Mamba 2 (Dao & Gu 2024, arXiv:2405.21060), silu(gate) multiplies x; with `norm_before_gate`, y.
    """

    group_count: int  # number of groups
    group_width: int  # N, the columns of one group in the whole model
    # `(start, stop, group, is counted)` for each run of this rank's columns in one group. Columns that an earlier rank
    # also holds are counted only on that rank.
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
        """Return y / w for this rank's columns `[…, columns]`, in the data type of the inputs; a collective."""
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
    """Statistical top-k (You et al. 2025, arXiv:2506.06644) over a cut width:

        y = max(0, x − μ − σ·Φ⁻¹(s)),   μ = Σᵣ Σxᵣ / N,   σ² = Σᵣ Σ(xᵣ − μ)² / N

    The layer takes and returns this rank's columns `[…, columns]`.

    Attributes:
        activation_sparsity: s, the fraction of columns to drop.
    """

    width: int  # N, the columns of the whole model

    def _gaussian_topk(self, inputs: torch.Tensor) -> torch.Tensor:
        quantile = torch.special.ndtri(torch.tensor(self.activation_sparsity, device=inputs.device)).to(inputs.dtype)
        mean = self.communicator.all_reduce(inputs.sum(-1, keepdim=True)) / self.width
        variance = self.communicator.all_reduce((inputs - mean).pow(2).sum(-1, keepdim=True)) / self.width
        return nn.functional.relu(inputs - (mean + variance.sqrt() * quantile))


class HeadNormsParallel(ParallelLayer):
    """A norm for each head, yₕ = normₕ(xₕ), over this rank's heads: dimension 1 of the input."""

    head_indices: Sequence[int]  # indices of this rank's heads in the list `norms`

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = hidden_states.split(1, dim=1)
        return torch.cat([self.norms[index](head) for index, head in zip(self.head_indices, heads, strict=True)], dim=1)


@dataclass(frozen=True)
class Norm(Rule):
    """Normalise cut outputs by the root mean square of all outputs; the ranks sum their squares. The norm module's
    attributes give its groups of columns. A gate may multiply the inputs or the outputs.

    A norm per head needs no rule, because its width is not cut.

    Args:
        unit: unit of the width, as in `Column`.
        heads: path of the `Heads` rule that counts the width; by default the nearest rule above the norm.
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
    """Apply to each head its own norm, for a module with one norm per head in a list `norms`. Every rank holds all
    norms.

    Args:
        unit: kind of the heads, "query" or "key".
    """

    unit: Literal["query", "key"] = "query"

    def apply(self, draft: Draft, path: str) -> None:
        indices = [share.key if self.unit == "key" else share.query for share in draft.heads]
        draft.layer(path, HeadNormsParallel, [{"head_indices": mine} for mine in indices])


@dataclass(frozen=True)
class GaussianTopK(Rule):
    """Compute a top-k over cut outputs from the mean and the deviation of all outputs. For a module whose forward
    calls `_gaussian_topk` (Gemma 3n's MLP)."""

    def apply(self, draft: Draft, path: str) -> None:
        width = draft.attribute(draft.modules[path], "intermediate_size")
        draft.layer(path, GaussianTopKParallel, width=width)
