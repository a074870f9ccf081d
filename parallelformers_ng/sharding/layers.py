"""The parallel layers: the one place where a collective is called.

Each is the layer it replaces plus an exchange. `inject.py` gives an existing module one of these classes, so that
whatever else the module carries (hooks, attributes, a subclass's own forward) stays as it was.

                    column-parallel                  row-parallel
    x ──────► [A₀] ──► y₀ ─► …nonlinearity… ─► [B₀] ──► z₀ ─┐
    x ──────► [A₁] ──► y₁ ─► …nonlinearity… ─► [B₁] ──► z₁ ─┴─ Σ ─► z       (Megatron-LM, arXiv:1909.08053, §3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import PolicyError


class ParallelLayer(nn.Module):
    """Base of the parallel layers.

    Attributes:
        communicator: what this rank's layers exchange through; set by the injector.
    """

    communicator: Communicator

    if TYPE_CHECKING:
        # It is mixed into a layer and has whatever that has: `weight`, `norms`, ….
        def __getattr__(self, name: str) -> Any: ...


class RowParallel(ParallelLayer):
    """Computes a partial product from this rank's inputs and sums it over the ranks: z = Σᵣ yᵣ Bᵣ + b.

    Rank 0 holds b and the others zeros, so it is added once.
    """

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.communicator.all_reduce(super().forward(*args, **kwargs))


class Reduced(ParallelLayer):
    """Sums what a module with cut parameters gives: its output, or the first item of a tuple of outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (self.communicator.all_reduce(output[0]), *output[1:])
        return self.communicator.all_reduce(output)


class GatheredColumnParallel(ParallelLayer):
    """Computes this rank's outputs and puts those of all ranks side by side: z = [x A₀ | x A₁ | …].

    Attributes:
        gathered_sizes: outputs of each rank.
    """

    gathered_sizes: Sequence[int]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.communicator.all_gather(super().forward(*args, **kwargs), dim=-1, sizes=self.gathered_sizes)


class VocabularyParallelEmbedding(ParallelLayer):
    """Looks up the ids that this rank's rows hold, zeros for the others, and sums over the ranks.

    Attributes:
        first_row: first id of this rank.
        row_count: number of its rows, possibly 0.
        gathered_sizes: rows of each rank.
    """

    weight: torch.Tensor
    first_row: int
    row_count: int
    gathered_sizes: Sequence[int]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_range(input)
        if self.row_count == 0:
            found = self.weight.new_zeros(*input.shape, self.weight.shape[1])
        else:
            local = input - self.first_row
            elsewhere = (local < 0) | (local >= self.row_count)
            found = super().forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.communicator.all_reduce(found)

    def _check_range(self, ids: torch.Tensor) -> None:
        """A whole embedding refuses an id outside the vocabulary; here it would quietly look up zeros on every rank."""
        if ids.numel() == 0:
            return
        size = sum(self.gathered_sizes)
        if ids.device.type == "cpu":
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= size:
                raise IndexError(f"index out of range in self: id {low if low < 0 else high}, vocabulary of {size}")
        else:
            torch._assert_async(((ids >= 0) & (ids < size)).all())


class VocabularyParallelHead(GatheredColumnParallel):
    """The logits of this rank's part of the vocabulary, gathered from all ranks."""


@dataclass
class Recording:
    """What the caller of the present request wants to see besides the result.

    Attributes:
        weights: attention weights.
    """

    weights: bool = False


class HeadParallel(ParallelLayer):
    """Attention over this rank's heads. Nothing is exchanged, unless the caller asks for the weights of all heads.

    Attributes:
        head_sizes: query heads of each rank, 0 for a rank without any.
        weights_index: place of the weights among the outputs.
        weights_dim: their dimension of heads.
        recording: shared by all layers of a model.
    """

    head_sizes: Sequence[int]
    weights_index: int
    weights_dim: int
    recording: Recording

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.recording.weights or not isinstance(output, tuple) or len(output) <= self.weights_index:
            return output
        weights = output[self.weights_index]
        if not isinstance(weights, torch.Tensor):
            return output
        whole = self.gather_heads(weights, self.weights_dim)
        return (*output[: self.weights_index], whole, *output[self.weights_index + 1 :])

    def gather_heads(self, weights: torch.Tensor, dim: int) -> torch.Tensor:
        """The weights of all heads; a rank without heads of its own has computed some of a copied one, which it leaves
        out."""
        own = weights.narrow(dim, 0, self.head_sizes[self.communicator.rank])
        return self.communicator.all_gather(own, dim=dim, sizes=self.head_sizes)


class BiasedHeadParallel(HeadParallel):
    """Attention over this rank's heads where the model makes a bias for all heads outside: b ↦ b[heads of this rank].

    Attributes:
        bias_names: keyword arguments of the forward that hold such a bias, `[batch, heads or 1, …, keys]` or
            `[batch · heads, …, keys]`.
        head_indices: this rank's heads.
        head_count: heads of the whole model.
    """

    bias_names: Sequence[str]
    head_indices: Sequence[int]
    head_count: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name in self.bias_names:
            if name not in kwargs:
                raise PolicyError(f"{type(self).__name__}: bias {name!r} is not among the arguments {sorted(kwargs)}")
            if kwargs[name] is not None:
                kwargs[name] = self._own_part(kwargs[name])
        return super().forward(*args, **kwargs)

    def _own_part(self, bias: torch.Tensor) -> torch.Tensor:
        heads = torch.tensor(self.head_indices, device=bias.device)
        if bias.ndim == 4:
            return bias if bias.shape[1] == 1 else bias.index_select(1, heads)
        return bias.unflatten(0, (-1, self.head_count)).index_select(1, heads).flatten(0, 1)


class RMSNormParallel(ParallelLayer):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) over a width that is cut:

        y = w ⊙ x / √(ε + Σᵣ ‖xᵣ‖² / N)

    Attributes:
        width: N, columns of the whole model.
        counted: this rank's columns whose squares it adds; those that an earlier rank holds too are left to that rank.
    """

    weight: torch.Tensor
    variance_epsilon: float
    width: int
    counted: Sequence[tuple[int, int]]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inputs = hidden_states.to(torch.float32)
        squares = inputs.new_zeros(*inputs.shape[:-1], 1)
        for start, stop in self.counted:
            squares = squares + inputs[..., start:stop].pow(2).sum(-1, keepdim=True)
        mean = self.communicator.all_reduce(squares) / self.width
        normalised = inputs * torch.rsqrt(mean + self.variance_epsilon)
        return (self.weight * normalised).to(hidden_states.dtype)


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


@cache
def parallel_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[nn.Module]:
    """`RowParallel` + `Linear` → `RowParallelLinear`, a class made once."""
    return type(f"{kind.__name__}{layer.__name__}", (kind, layer), {"__module__": layer.__module__})
