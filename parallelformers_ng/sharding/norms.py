"""Parallel layers that need a figure of a whole width of which a rank holds some columns: norms, choices by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parallelformers_ng.collectives.traced import all_reduce
from parallelformers_ng.sharding.layers import ParallelLayer


class RMSNormParallel(ParallelLayer):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) over a width that is cut, or over each of some
    groups of columns g that ranks may share:

        y = w ⊙ x / √(ε + Σᵣ ‖xᵣ,g‖² / N)

    Attributes:
        group_count, group_width: number of groups, and N, the columns of one of them in the whole model.
        runs: `(start, stop, group, is counted)` for each run of this rank's columns in one group; the squares of those
            that an earlier rank holds too are left to that rank.
    """

    weight: torch.Tensor
    variance_epsilon: float
    group_count: int
    group_width: int
    runs: Sequence[tuple[int, int, int, bool]]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.normalise(hidden_states.to(torch.float32))).to(hidden_states.dtype)

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        squares = inputs.new_zeros(*inputs.shape[:-1], self.group_count)
        for start, stop, group, is_counted in self.runs:
            if is_counted:
                squares[..., group] += inputs[..., start:stop].pow(2).sum(-1)
        scales = torch.rsqrt(all_reduce(self.communicator, squares) / self.group_width + self.variance_epsilon)
        if self.group_count == 1:
            return inputs * scales
        scaled = [inputs[..., start:stop] * scales[..., group : group + 1] for start, stop, group, _ in self.runs]
        return torch.cat(scaled, dim=-1)


class GatedRMSNormParallel(RMSNormParallel):
    """The same, times silu(gate): of its input, or of its output where the module says `norm_before_gate`."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        inputs = hidden_states.to(torch.float32)
        factor = 1.0 if gate is None else nn.functional.silu(gate.to(torch.float32))
        if getattr(self, "norm_before_gate", False):
            output = self.weight * self.normalise(inputs) * factor
        else:
            output = self.weight * self.normalise(inputs * factor)
        return output.to(hidden_states.dtype)


class GaussianTopKParallel(ParallelLayer):
    """Statistical top-k (You et al. 2025, arXiv:2506.06644) over a width that is cut:

        y = max(0, x − μ − σ·Φ⁻¹(s)),   μ = Σᵣ Σxᵣ / N,   σ² = Σᵣ Σ(xᵣ − μ)² / N

    Attributes:
        width: N, columns of the whole model.
        activation_sparsity: s, the share of columns to drop.
    """

    width: int
    activation_sparsity: float

    def _gaussian_topk(self, inputs: torch.Tensor) -> torch.Tensor:
        quantile = torch.special.ndtri(torch.tensor(self.activation_sparsity, device=inputs.device)).to(inputs.dtype)
        mean = all_reduce(self.communicator, inputs.sum(-1, keepdim=True)) / self.width
        variance = all_reduce(self.communicator, (inputs - mean).pow(2).sum(-1, keepdim=True)) / self.width
        return nn.functional.relu(inputs - (mean + variance.sqrt() * quantile))


class HeadNormsParallel(ParallelLayer):
    """A norm for each head, yₕ = normₕ(xₕ), over this rank's heads: dimension 1 of the input.

    Attributes:
        head_indices: this rank's heads, which choose from the list `norms`.
    """

    norms: nn.ModuleList
    head_indices: Sequence[int]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = hidden_states.split(1, dim=1)
        return torch.cat([self.norms[index](head) for index, head in zip(self.head_indices, heads, strict=True)], dim=1)
