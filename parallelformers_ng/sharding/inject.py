"""Swaps the parallel layers in, as the plan says. Runs on a rank, on a skeleton whose tensors are still on `meta`."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.traced import register
from parallelformers_ng.sharding import attention, layers, norms
from parallelformers_ng.sharding.plan import LayerKind, ShardPlan

_CLASSES: dict[LayerKind, type[layers.ParallelLayer]] = {
    "gathered_column": layers.GatheredColumnParallel,
    "row": layers.RowParallel,
    "reduced": layers.Reduced,
    "reduced_input": layers.ReducedInput,
    "on_first_rank": layers.OnFirstRank,
    "vocabulary_embedding": layers.VocabularyParallelEmbedding,
    "vocabulary_head": layers.VocabularyParallelHead,
    "heads": layers.HeadParallel,
    "biased_heads": layers.BiasedHeadParallel,
    "narrowed_heads": attention.NarrowedHeadParallel,
    "ngram_attention": attention.NgramAttentionParallel,
    "reformer_attention": attention.ReformerAttentionParallel,
    "renewed": attention.RenewedAttention,
    "gathered_input": layers.GatheredInput,
    "grouped_column": layers.GroupedColumnParallel,
    "stored": layers.Stored,
    "quantized_embedding": layers.QuantizedEmbeddingParallel,
    "wavlm_attention": attention.WavLMAttentionParallel,
    "xlnet_attention": attention.XLNetAttentionParallel,
    "norm": norms.RMSNormParallel,
    "gated_norm": norms.GatedRMSNormParallel,
    "gaussian_topk": norms.GaussianTopKParallel,
    "head_norms": norms.HeadNormsParallel,
}


_COPY_OF = "_parallelformers_ng_copy_of"


def inject(model: nn.Module, plan: ShardPlan, rank: int, communicator: Communicator) -> None:
    """Turn `model` into rank `rank`'s share of it: parallel layers, local attributes, no weights yet.

    A column-parallel layer needs no class of its own: it is the same layer with fewer outputs.
    """
    register(communicator)
    settle(model, plan)
    for layer in plan.layers:
        module: Any = model.get_submodule(layer.path)
        if layer.kind in _CLASSES:
            module.__class__ = layers.parallel_class(_CLASSES[layer.kind], type(module))  # type: ignore[arg-type]
            module.communicator = communicator
        for name, value in layer.attributes[rank].items():
            set_attribute(module, name, value)
        if isinstance(module, layers.VocabularyParallelEmbedding):
            # torch checks it against the rows held here; it only matters to gradients.
            module.padding_idx = None  # type: ignore[assignment]


def settle(model: nn.Module, plan: ShardPlan) -> None:
    """Set what a cast changes of a model besides its tensors."""
    for name, value in plan.settings.items():
        owner, _, last = name.rpartition(".")
        setattr(attrgetter(owner)(model) if owner else model, last, value)


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set the dotted `name` beneath a module. A configuration on the way is copied first: others still read the
    whole."""
    owner: Any = module
    *path, last = name.split(".")
    for part in path:
        if part == "config":
            whole = getattr(owner, part)
            setattr(owner, part, copy.copy(whole))
            vars(getattr(owner, part)).setdefault(_COPY_OF, whole)
        owner = getattr(owner, part)
    setattr(owner, last, value)


def set_config(model: nn.Module, name: str, value: Any) -> None:
    """Change `name`, dotted from the model on, of a configuration, also in the copies that `set_attribute` made of it.

    A copy whose value differs was given a value of its own, which stays.
    """
    owner, _, last = name.rpartition(".")
    held = attrgetter(owner)(model)
    whole = getattr(held, _COPY_OF, held)
    before = getattr(whole, last, None)
    for config in (whole, *(module.__dict__.get("config") for module in model.modules())):
        if (config is whole or getattr(config, _COPY_OF, None) is whole) and getattr(config, last, None) == before:
            setattr(config, last, value)


def get_tensor(model: nn.Module, name: str, is_buffer: bool) -> torch.Tensor:
    """The parameter or buffer called `name`, as it is held: a rank's own part."""
    path, _, short = name.rpartition(".")
    owner = model.get_submodule(path)
    held = (owner._buffers if is_buffer else owner._parameters)[short]
    assert held is not None, f"{name} is None"
    return held


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor, is_buffer: bool) -> None:
    """Put `tensor` where `name` says, as a buffer or as a parameter (one without gradient, if it is none yet)."""
    path, _, short = name.rpartition(".")
    owner = model.get_submodule(path)
    if not is_buffer and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=False)
    held: dict[str, Any] = owner._buffers if is_buffer else owner._parameters
    held[short] = tensor


def cut(model: nn.Module, plan: ShardPlan, rank: int, communicator: Communicator) -> nn.Module:
    """A copy of `model` that is rank `rank`'s share of it, weights included. The model itself is left as it is.

    For proofs and tests in one process; workers build theirs from a skeleton instead.
    """
    names = {id(t): t for t in (*model.parameters(), *model.buffers())}
    share = copy.deepcopy(model, dict(names))  # the copy shares the tensors, so nothing is held twice
    inject(share, plan, rank, communicator)
    held: dict[str, torch.Tensor] = {}
    for name, tensor_plan in plan.tensors.items():
        if tensor_plan.storage not in held:
            whole = get_tensor(model, name, tensor_plan.is_buffer)
            part = tensor_plan.shards[rank].of(whole.detach()).to(tensor_plan.dtype, copy=True)
            held[tensor_plan.storage] = part.contiguous()
        set_tensor(share, name, held[tensor_plan.storage], tensor_plan.is_buffer)
    return share
