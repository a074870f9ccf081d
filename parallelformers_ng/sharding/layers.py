"""The parallel layers: the one place where a collective is called.

Each is the layer it replaces plus an exchange. `inject.py` gives an existing module one of these classes, so that
whatever else the module carries (hooks, attributes, a subclass's own forward) stays as it was.

                    column-parallel                  row-parallel
    x ──────► [A₀] ──► y₀ ─► …nonlinearity… ─► [B₀] ──► z₀ ─┐
    x ──────► [A₁] ──► y₁ ─► …nonlinearity… ─► [B₁] ──► z₁ ─┴─ Σ ─► z       (Megatron-LM, arXiv:1909.08053, §3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.traced import all_gather, all_reduce, is_traced
from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.own_heads import OwnHeads, own_part
from parallelformers_ng.sharding.policy import Place


class ParallelLayer(nn.Module):
    """Base of the parallel layers.

    Attributes:
        communicator: what this rank's layers exchange through; set by the injector.
    """

    communicator: Communicator

    if TYPE_CHECKING:
        # It is mixed into a layer and has whatever that has: `weight`, `norms`, ….
        def __getattr__(self, name: str) -> Any: ...


class Reduced(ParallelLayer):
    """Sums what a module with cut parameters gives: its output, or the first item of a tuple of outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return on_tensor(super().forward(*args, **kwargs), partial(all_reduce, self.communicator))


class RowParallel(Reduced):
    """Computes a partial product from this rank's inputs and sums it over the ranks: z = Σᵣ yᵣ Bᵣ + b.

    Rank 0 holds b and the others zeros, so it is added once.
    """


class OnFirstRank(ParallelLayer):
    """A path without weights beside cut ones whose outputs are summed: rank 0 takes it, the others give zeros."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output = super().forward(states)
        return output if self.communicator.rank == 0 else torch.zeros_like(output)


class ReducedInput(ParallelLayer):
    """Sums partial products before it does to them what a sum does not commute with: z = f(Σᵣ yᵣ Bᵣ), a norm f."""

    def forward(self, partial_product: torch.Tensor) -> torch.Tensor:
        return super().forward(all_reduce(self.communicator, partial_product))


class GatheredColumnParallel(ParallelLayer):
    """Computes this rank's outputs and puts those of all ranks side by side: z = [x A₀ | x A₁ | …].

    Attributes:
        gathered_sizes: outputs of each rank.
        gathered_dim: their dimension; a convolution's is that of its channels.
    """

    gathered_sizes: Sequence[int]
    gathered_dim: int = -1

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        part = super().forward(*args, **kwargs)
        return all_gather(self.communicator, part, self.gathered_dim, self.gathered_sizes)


class GatheredInput(ParallelLayer):
    """Puts its inputs together, of which each rank has some, and computes this rank's outputs: z = [x₀ | x₁ | …] Aᵣ.

    Attributes:
        input_sizes: inputs that each rank has to give, 0 for a rank with nothing but a copy.
    """

    input_sizes: Sequence[int]

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        own = part.narrow(-1, 0, self.input_sizes[self.communicator.rank])
        return super().forward(all_gather(self.communicator, own, -1, self.input_sizes))


class GroupedColumnParallel(ParallelLayer):
    """A convolution in groups of channels of which this rank computes some outputs, each from its own group's inputs.

    Attributes:
        pieces: for each group that has outputs here, the range of its input channels and how many outputs they are.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    pieces: Sequence[tuple[int, int, int]]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        counts = [count for *_, count in self.pieces]
        biases = [None] * len(counts) if self.bias is None else self.bias.split(counts)
        outputs = [
            nn.functional.conv1d(states[:, start:stop], weight, bias, self.stride, self.padding, self.dilation)
            for (start, stop, _), weight, bias in zip(self.pieces, self.weight.split(counts), biases, strict=True)
        ]
        return torch.cat(outputs, dim=1) if outputs else states[:, :0]


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
            found = self._look_up(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        return all_reduce(self.communicator, found)

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows)

    def _check_range(self, ids: torch.Tensor) -> None:
        """A whole embedding refuses an id outside the vocabulary; here it would quietly look up zeros on every rank."""
        if ids.numel() == 0:
            return
        size = sum(self.gathered_sizes)
        if ids.device.type == "cpu" and not is_traced():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= size:
                raise IndexError(f"index out of range in self: id {low if low < 0 else high}, vocabulary of {size}")
        else:
            torch._assert_async(((ids >= 0) & (ids < size)).all())


class QuantizedEmbeddingParallel(VocabularyParallelEmbedding):
    """I-BERT's embedding, which gives a scaling factor as well: none, as long as it does not quantize."""

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), None

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return super()._look_up(rows)[0]


class Stored(ParallelLayer):
    """A module with parameters and buffers that are spread over the ranks and put together whenever they are read.

    Attributes:
        stored: name → its dimension that is spread, and how much of it each rank holds.
    """

    stored: Mapping[str, tuple[int, Sequence[int]]]

    @property
    def _flat_weights(self) -> list[torch.Tensor]:
        """What torch's recurrent layers take for their parameters; they keep a list of them besides."""
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[torch.Tensor]) -> None:
        """The list that torch makes is left aside: it has the parts."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # where torch looks up parameters
        if name not in self.__dict__.get("stored", ()):
            return value
        dim, sizes = self.stored[name]
        if value.shape[dim] != sizes[self.communicator.rank]:
            return value  # the modelling code has put a new tensor in its place
        return all_gather(self.communicator, value, dim, sizes)


class VocabularyParallelHead(GatheredColumnParallel):
    """The logits of this rank's part of the vocabulary, gathered from all ranks."""


class HeadParallel(ParallelLayer):
    """Attention over this rank's heads. Nothing is exchanged, unless the weights of all heads are looked at.

    Attributes:
        head_sizes: query heads of each rank, 0 for a rank without any.
        weights_at: the outputs with a dimension of heads: their places, step by step, and that dimension.
    """

    head_sizes: Sequence[int]
    weights_at: Sequence[tuple[tuple[Place, ...], int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(own_part, args))
        output = super().forward(*args, **{name: own_part(value) for name, value in kwargs.items()})
        for place, dim in self.weights_at:
            output = replaced(output, place, partial(self.shown, dim=dim))
        return output

    def shown(self, weights: torch.Tensor, dim: int, change: Callable[[torch.Tensor], Any] | None = None) -> Any:
        """What others get for the weights of this rank's heads: all heads' when they look.

        Args:
            weights: four or more dimensions; a tensor of another shape has no heads in it.
            dim: their dimension of heads.
            change: made of the weights of all heads before they are looked at.
        """
        if weights.ndim < 4 or weights.shape[dim] != max(1, self.head_sizes[self.communicator.rank]):
            return weights

        def gather() -> torch.Tensor:
            whole = self.gather_heads(weights, dim)
            return whole if change is None else change(whole)

        if is_traced():
            return gather()  # the compiler leaves out what nobody looks at
        return OwnHeads(weights, dim, sum(self.head_sizes), gather)

    def gather_heads(self, weights: torch.Tensor, dim: int) -> torch.Tensor:
        """The weights of all heads; a rank without heads of its own has computed some of a copied one, which it leaves
        out."""
        own = weights.narrow(dim, 0, self.head_sizes[self.communicator.rank])
        return all_gather(self.communicator, own, dim, self.head_sizes)


class BiasedHeadParallel(HeadParallel):
    """Attention over this rank's heads where the model makes a bias for all heads outside: b ↦ b[heads of this rank].

    Attributes:
        bias_names: keyword arguments of the forward that hold such a bias, `[batch, heads or 1, …, keys]` of four or
            more dimensions, or `[batch · heads, …, keys]` of three.
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
        if bias.ndim >= 4:
            return bias if bias.shape[1] == 1 else bias.index_select(1, heads)
        return bias.unflatten(0, (-1, self.head_count)).index_select(1, heads).flatten(0, 1)


def on_tensor(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change an output, or the first item of a tuple of outputs."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def replaced(output: Any, place: Sequence[Place], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same outputs with the tensor at `place` changed; as they are, where there is none."""
    step: Any
    step, *rest = place
    known = step in output if isinstance(output, dict) else isinstance(output, (list, tuple)) and step < len(output)
    if not known:
        return output
    before = found = output[step]
    if rest:
        found = replaced(found, rest, change)
    elif isinstance(found, torch.Tensor):
        found = change(found)
    if found is before:
        return output
    if isinstance(output, dict):
        return {**output, step: found}
    items = [*output[:step], found, *output[step + 1 :]]
    if isinstance(output, list):
        return items
    return type(output)(*items) if hasattr(output, "_fields") else tuple(items)


@cache
def parallel_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[nn.Module]:
    """`RowParallel` + `Linear` → `RowParallelLinear`, a class made once."""
    return type(f"{kind.__name__}{layer.__name__}", (kind, layer), {"__module__": layer.__module__})
