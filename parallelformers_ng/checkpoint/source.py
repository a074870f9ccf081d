"""Where the bytes of each tensor of a checkpoint are. Nothing is read here but headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from parallelformers_ng.checkpoint.files import file_leaves
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.location import Location, open_weights
from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.checkpoint.sharded import is_sharded_directory, open_sharded
from parallelformers_ng.checkpoint.store import names_of_each, place
from parallelformers_ng.sharding.plan import ShardPlan, TensorPlan
from parallelformers_ng.sharding.tensors import get_tensor
from parallelformers_ng.sharding.plan import ShardPlan


class Checkpoint:
    """What every tensor of a model that lies in files follows from.

    Args:
        nodes: name of a parameter or buffer → how to read it. What is not named is in memory.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = dict(nodes)

    @classmethod
    def take(cls, model: PreTrainedModel, plan: ShardPlan) -> Checkpoint:
        """Take the unread tensors out of a model that `load_skeleton` made; `meta` tensors take their places."""
        nodes: dict[str, Node] = {}
        for names in names_of_each(model, plan):
            held = get_tensor(model, names[0], plan.tensors[names[0]].is_buffer)
            if isinstance(held, LazyTensor):
                nodes.update(dict.fromkeys(names, held.node))
                place(model, names, plan, torch.empty(held.shape, dtype=held.dtype, device="meta"))
        return cls(nodes)

    def in_memory(self, plan: ShardPlan) -> ShardPlan:
        """The plan of what is not in files: parameters that were missing, and buffers that are computed."""
        rest = {name: tensor for name, tensor in plan.tensors.items() if tensor.storage not in self.nodes}
        return dataclasses.replace(plan, tensors=rest)


def prepare_conversions() -> None:
    """Make transformers' table of renamed parameters, which the first load of a process otherwise waits for."""
    get_checkpoint_conversion_mapping("")


def lazy_state(location: Location) -> dict[str, LazyTensor]:
    """All stored tensors by their names in the checkpoint, none of them read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if is_sharded_directory(location.directory):
        return {name: LazyTensor(node) for name, node in open_sharded(location.directory).items()}
    return {leaf.key: LazyTensor(leaf) for file in open_weights(location) for leaf in file_leaves(file)}
