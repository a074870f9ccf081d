"""Finds the layers that are as wide as the vocabulary: input embeddings and output heads, tied or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class VocabularyLayer:
    """One embedding or head that can be cut by rows of the vocabulary.

    Attributes:
        path: dotted path of the module.
        kind: which parallel layer it becomes.
        size: rows of the vocabulary.
        tensors: names of the parameters to cut, dimension 0 each.
    """

    path: str
    kind: Literal["vocabulary_embedding", "vocabulary_head"]
    size: int
    tensors: tuple[str, ...]


def find_vocabulary(model: nn.Module, taken: set[str]) -> list[VocabularyLayer]:
    """The embeddings and heads that the model and its sub-models name as theirs, and the embeddings tied to one of
    these.

    A weight that is also used by any other layer stays whole, with all its owners: cutting only some of them would
    change what the others read.

    Args:
        taken: names of tensors that a policy cut already; their layers are left alone.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, VocabularyLayer] = {}
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        embedding = _ask(module.get_input_embeddings)
        if isinstance(embedding, nn.Embedding) and id(embedding) in paths:
            _add_embedding(found, paths[id(embedding)], embedding)
        head = _ask(module.get_output_embeddings)
        if isinstance(head, nn.Linear) and id(head) in paths and not _holds_layers(head):
            path = paths[id(head)]
            tensors = (f"{path}.weight",) if head.bias is None else (f"{path}.weight", f"{path}.bias")
            found[path] = VocabularyLayer(path, "vocabulary_head", head.weight.shape[0], tensors)

    weights = {id(model.get_submodule(layer.path).weight) for layer in found.values()}
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module.weight), set()).add(path)
            if isinstance(module, nn.Embedding) and id(module.weight) in weights:
                _add_embedding(found, path, module)
    return [
        layer
        for layer in found.values()
        if owners[id(model.get_submodule(layer.path).weight)] <= set(found) and not taken & set(layer.tensors)
    ]


def _add_embedding(found: dict[str, VocabularyLayer], path: str, embedding: nn.Embedding) -> None:
    """Note an embedding, unless it renormalises its rows in place, which a rank can do only to its own."""
    if embedding.max_norm is None and not _holds_layers(embedding):
        found[path] = VocabularyLayer(path, "vocabulary_embedding", embedding.weight.shape[0], (f"{path}.weight",))


def _holds_layers(module: nn.Module) -> bool:
    """Whether there are further layers inside: then it is more than its rows (a part for added tokens, an adapter)."""
    return any(True for _ in module.children())


def _ask(accessor: object) -> nn.Module | None:
    """Call a `get_…_embeddings` method; many model classes answer that they have none by raising."""
    try:
        return accessor()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
