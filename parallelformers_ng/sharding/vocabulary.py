"""Cuts embeddings and output heads by rows of the vocabulary: z = Σᵣ Eᵣ[id] and logits = [h E₀ᵀ | h E₁ᵀ | …]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.live_code.self_changes import renormalizes
from parallelformers_ng.live_code.stock import foreign_layer
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layers import ParallelLayer
from parallelformers_ng.sharding.linear import GatheredColumnParallel, cannot_cut
from parallelformers_ng.sharding.look_ups import check_range, in_range
from parallelformers_ng.sharding.partition import cut_width, width_of
from parallelformers_ng.sharding.policy import Rule


class VocabularyParallelEmbedding(ParallelLayer):
    """An embedding of which each rank holds some rows (Megatron-LM, arXiv:1909.08053, §3).

    Each rank looks up the ids of its rows and takes zeros for all other ids; the ranks sum the vectors. `forward` takes
    ids `[…]` and returns vectors `[…, width]`, equal on all ranks. For an id outside the vocabulary it raises
    IndexError on CPU; on other devices the request raises IndexError at its end.
    """

    takes_part = False
    gives_part = False
    gathered_sizes: Sequence[int]  # number of rows of each rank, possibly 0; the sum is the size of the vocabulary

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input, low, high = self._in_range(input)
        sizes, rank = self.gathered_sizes, self.communicator.rank
        rows, start = sizes[rank], sum(sizes[:rank])
        if rows == 0:
            vectors = self.weight.new_zeros(*input.shape, self.weight.shape[1])
        elif high < start or low >= start + rows:
            vectors = self._look_up(torch.zeros_like(input)).zero_()  # a read of `weight` may dequantize it
        elif low >= start and high < start + rows:
            vectors = self._look_up(input - start)
        else:
            local = input - start
            elsewhere = (local < 0) | (local >= rows)
            vectors = self._look_up(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.communicator.all_reduce(vectors)

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows)

    def _in_range(self, ids: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """Return the ids, and a lower and an upper bound of their values.

        An id outside the vocabulary is an error on CPU and in compiled code; other devices clamp and record such ids.
        """
        size = sum(self.gathered_sizes)
        if is_compiling():
            torch._assert_async(((ids >= 0) & (ids < size)).all())
        elif ids.device.type != "cpu":
            return in_range(ids, size), 0, size - 1
        elif ids.numel():
            low, high = [int(ids)] * 2 if ids.numel() == 1 else [int(bound) for bound in torch.aminmax(ids)]
            check_range(low, high, size)
            return ids, low, high
        return ids, 0, size - 1


class QuantizedEmbeddingParallel(VocabularyParallelEmbedding):
    """I-BERT's embedding, which also returns a scaling factor: None, because the embedding does not quantize."""

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), None

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return super()._look_up(rows)[0]


@dataclass(frozen=True)
class Vocabulary(Rule):
    """Cut an embedding by rows: each rank looks up the ids of its rows, and the ranks sum the results. The rule is
    needed only for embeddings that the model's `get_input_embeddings` does not return."""

    def apply(self, draft: Draft, path: str) -> None:
        module: Any = draft.modules[path]
        if not isinstance(module, nn.Embedding) and not hasattr(module, "weight_integer"):
            raise PolicyError(cannot_cut(module, "rows of its vocabulary (an Embedding can)"))
        cls = VocabularyParallelEmbedding if isinstance(module, nn.Embedding) else QuantizedEmbeddingParallel
        cut_rows(draft, path, cls)


def cut_rows(draft: Draft, path: str, cls: type[ParallelLayer]) -> None:
    """Record in the draft each rank's rows of an embedding or an output head."""
    module: Any = draft.modules[path]
    ranges = cut_width(module.weight.shape[0], ["column"], [], draft.world_size, shares=draft.row_shares)
    for name in ("weight", "bias"):
        if module._parameters.get(name) is not None:
            draft.cut(f"{path}.{name}", 0, ranges)
    # Without None, torch would refuse a `padding_idx` beyond this rank's rows. Only gradients need `padding_idx`.
    padding: dict[str, Any] = {"padding_idx": None} if issubclass(cls, VocabularyParallelEmbedding) else {}
    draft.layer(path, cls, gathered_sizes=tuple(map(width_of, ranges)), **padding)


def vocabulary_modules(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the input embedding and the output head of the model and of each sub-model; None for a missing module."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            yield _ask(module.get_input_embeddings), _ask(module.get_output_embeddings)


def find_vocabulary(model: nn.Module) -> dict[str, type[ParallelLayer]]:
    """Return the input embeddings and output heads of a model and its sub-models, and the embeddings tied to any of
    these: dotted path → parallel layer that cuts the module by rows of the vocabulary.

    A weight that any other layer also uses stays whole in all its layers, because that other layer needs all rows.
    Layers with foreign code or with submodules, and embeddings with `max_norm`, are left out.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    layers: dict[str, type[ParallelLayer]] = {}
    for embedding, head in vocabulary_modules(model):
        if isinstance(embedding, nn.Embedding) and id(embedding) in paths and _is_plain(embedding):
            layers[paths[id(embedding)]] = VocabularyParallelEmbedding
        if isinstance(head, nn.Linear) and id(head) in paths and _is_plain(head):
            layers[paths[id(head)]] = GatheredColumnParallel

    weights = {id(model.get_submodule(path).weight) for path in layers}
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module.weight), set()).add(path)
            if isinstance(module, nn.Embedding) and id(module.weight) in weights and _is_plain(module):
                layers[path] = VocabularyParallelEmbedding
    return {path: cls for path, cls in layers.items() if owners[id(model.get_submodule(path).weight)] <= set(layers)}


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer runs no foreign code and contains no layers, such as a part for added tokens or an
    adapter. An embedding that renormalises rows in place is not plain: a rank could change only its own rows."""
    return not renormalizes(layer) and not any(True for _ in layer.children()) and not foreign_layer(layer)


def _ask(accessor: object) -> nn.Module | None:
    """Call `get_input_embeddings` or `get_output_embeddings`; return None if the model's class does not support it."""
    try:
        return accessor()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
