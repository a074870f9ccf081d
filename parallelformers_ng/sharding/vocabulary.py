"""Embeddings and output heads, cut by rows of the vocabulary: z = Σᵣ Eᵣ[id] and logits = [h E₀ᵀ | h E₁ᵀ | …]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.live_code.stock import foreign_layer
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layers import ParallelLayer
from parallelformers_ng.sharding.linear import GatheredColumnParallel, cannot_cut
from parallelformers_ng.sharding.look_ups import in_range
from parallelformers_ng.sharding.partition import HeadShare, cut_width
from parallelformers_ng.sharding.policy import Rule


class VocabularyParallelEmbedding(ParallelLayer):
    """Looks up the ids that this rank's rows hold, zeros for the others, and sums over the ranks.

    Attributes:
        first_row: first id of this rank.
        row_count: number of its rows, possibly 0.
        gathered_sizes: rows of each rank.
    """

    takes_part = False
    gives_part = False
    weight: torch.Tensor
    first_row: int
    row_count: int
    gathered_sizes: Sequence[int]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = self._in_range(input)
        if self.row_count == 0:
            vectors = self.weight.new_zeros(*input.shape, self.weight.shape[1])
        else:
            local = input - self.first_row
            elsewhere = (local < 0) | (local >= self.row_count)
            vectors = self._look_up(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.communicator.all_reduce(vectors)

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows)

    def _in_range(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a whole embedding refuses an id outside the vocabulary; here it would quietly look up zeros on
        every rank."""
        size = sum(self.gathered_sizes)
        if is_compiling():
            torch._assert_async(((ids >= 0) & (ids < size)).all())
        elif ids.device.type != "cpu":
            return in_range(ids, size)
        elif ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= size:
                raise IndexError(f"index out of range in self: id {low if low < 0 else high}, vocabulary of {size}")
        return ids


class QuantizedEmbeddingParallel(VocabularyParallelEmbedding):
    """I-BERT's embedding, which gives a scaling factor as well: none, as long as it does not quantize."""

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), None

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return super()._look_up(rows)[0]


@dataclass(frozen=True)
class Vocabulary(Rule):
    """Cut an embedding by rows: each rank looks up the ids that it holds, and the results are summed. Needed for tables
    that the model does not name as its input embeddings."""

    def apply(self, draft: Draft, path: str, heads: list[HeadShare]) -> None:
        module: Any = draft.modules[path]
        if not isinstance(module, nn.Embedding) and not hasattr(module, "weight_integer"):
            raise PolicyError(cannot_cut(draft.who, module, "rows of its vocabulary (an Embedding can)"))
        cls = VocabularyParallelEmbedding if isinstance(module, nn.Embedding) else QuantizedEmbeddingParallel
        cut_rows(draft, VocabularyLayer(path, cls, module.weight.shape[0], (f"{path}.weight",)))


@dataclass(frozen=True)
class VocabularyLayer:
    """One embedding or head that can be cut by rows of the vocabulary.

    Attributes:
        path: dotted path of the module.
        cls: the parallel layer that it becomes.
        size: rows of the vocabulary.
        tensors: names of the parameters to cut, dimension 0 each.
    """

    path: str
    cls: type[ParallelLayer]
    size: int
    tensors: tuple[str, ...]


def cut_rows(draft: Draft, layer: VocabularyLayer, rule: str = "") -> None:
    """Give each rank its rows of an embedding or a head."""
    ranges = cut_width(layer.size, ["column"], [], draft.world_size, shares=draft.shares)
    for name in layer.tensors:
        draft.cut(name, 0, ranges, rule=rule)
    bounds = [rank_ranges[0] if rank_ranges else (0, 0) for rank_ranges in ranges]
    sizes = tuple(stop - start for start, stop in bounds)
    shared: dict[str, Any] = {"gathered_sizes": sizes}
    if issubclass(layer.cls, VocabularyParallelEmbedding):
        shared["padding_idx"] = None  # torch checks it against the rows held here; it only matters to gradients
    draft.layer(
        layer.path, layer.cls, [{"first_row": start, "row_count": stop - start, **shared} for start, stop in bounds]
    )


def vocabulary_modules(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Return the input embeddings and output heads that the model and its sub-models name; empty if none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            yield _ask(module.get_input_embeddings), _ask(module.get_output_embeddings)


def find_vocabulary(model: nn.Module, taken: set[str]) -> list[VocabularyLayer]:
    """Return the embeddings and heads that the model and its sub-models name as theirs, and the embeddings tied to one
    of these.

    A weight that is also used by any other layer stays whole, with all its owners: cutting only some of them would
    change what the others read.

    Args:
        taken: names of tensors that a policy cut already; their layers are left alone.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    layers: dict[str, VocabularyLayer] = {}
    for embedding, head in vocabulary_modules(model):
        if isinstance(embedding, nn.Embedding) and id(embedding) in paths:
            _add_embedding(layers, paths[id(embedding)], embedding)
        if isinstance(head, nn.Linear) and id(head) in paths and _is_plain(head):
            path = paths[id(head)]
            tensors = (f"{path}.weight",) if head.bias is None else (f"{path}.weight", f"{path}.bias")
            layers[path] = VocabularyLayer(path, GatheredColumnParallel, head.weight.shape[0], tensors)

    weights = {id(model.get_submodule(layer.path).weight) for layer in layers.values()}
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module.weight), set()).add(path)
            if isinstance(module, nn.Embedding) and id(module.weight) in weights:
                _add_embedding(layers, path, module)
    return [
        layer
        for layer in layers.values()
        if owners[id(model.get_submodule(layer.path).weight)] <= set(layers) and not taken & set(layer.tensors)
    ]


def _add_embedding(layers: dict[str, VocabularyLayer], path: str, embedding: nn.Embedding) -> None:
    """Note an embedding, unless it renormalises its rows in place, which a rank can do only to its own."""
    if embedding.max_norm is None and _is_plain(embedding):
        layers[path] = VocabularyLayer(
            path, VocabularyParallelEmbedding, embedding.weight.shape[0], (f"{path}.weight",)
        )


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is no more than its rows: without layers inside (a part for added tokens, an adapter),
    and without code of the program's."""
    return not any(True for _ in layer.children()) and not foreign_layer(layer)


def _ask(accessor: object) -> nn.Module | None:
    """Call a `get_…_embeddings` method; many model classes answer that they have none by raising."""
    try:
        return accessor()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
