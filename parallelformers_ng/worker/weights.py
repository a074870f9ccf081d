"""The weights of a rank: taken from the parent's memory or from files, written to others, given back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.nodes import Node, release
from parallelformers_ng.checkpoint.reading import read_shard
from parallelformers_ng.checkpoint.sharded_directory import write_rank
from parallelformers_ng.checkpoint.staging import Staging
from parallelformers_ng.checkpoint.store import map_shards
from parallelformers_ng.checkpoint.writing import WrittenFile
from parallelformers_ng.kernels.operators import StreamingLinear
from parallelformers_ng.kernels.side_by_side import lay_side_by_side
from parallelformers_ng.sharding.plan import Shard, ShardPlan, TensorPlan
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor
from parallelformers_ng.wire.format import FileDescriptor


class RankWeights:
    """What `ModelRunner` does with weights; the rest of it builds the model and runs it.

    Args:
        rank: its number.
        device: where it computes.
        emit: sends the parent what happens on the way.

    Attributes:
        model: the rank's modules, None where it has none.
        plan: how the model is cut.
    """

    def __init__(self, rank: int, device: torch.device, emit: Any) -> None:
        self.rank = rank
        self.device = device
        self.emit = emit
        self._clear()

    def _clear(self) -> None:
        self.model: Any = None
        self.plan: ShardPlan | None = None
        self.checkpoint = Checkpoint({})
        self.aliases: dict[str, list[str]] = {}
        self.staging: Staging | None = None

    def attach(self, own: FileDescriptor, shared: FileDescriptor, checkpoint: Checkpoint) -> None:
        """Take the weights that the parent holds: mapped on CPU, copied to the device on CUDA.

        Args:
            checkpoint: the files that hold the other weights; `load` takes those.
        """
        assert self.plan is not None, "build comes before attach"
        self.checkpoint = checkpoint
        self.aliases = self.plan.aliases()
        plan = self.checkpoint.in_memory(self.plan)
        try:
            held = map_shards(plan, self.rank, own.fd, shared.fd)
        finally:
            own.close()
            shared.close()
        if self.device.type != "cpu":
            held = {name: tensor.to(self.device) for name, tensor in held.items()}
        for name, tensor in plan.tensors.items():
            set_tensor(self.model, name, held[tensor.storage], tensor.is_buffer)

    def load(self, names: list[str]) -> None:
        """Take some stored tensors out of the checkpoint's files: mapped where they lie as this rank holds them, else
        only this rank's part is copied."""
        assert self.plan is not None
        for stored in names:
            node = self.checkpoint.nodes[stored]
            aliases = self.aliases[stored]
            part = self._read(node, self.plan.tensors[stored].shards[self.rank], all(map(self._streams, aliases)))
            for name in aliases:
                set_tensor(self.model, name, part, self.plan.tensors[name].is_buffer)

    def loaded(self) -> None:
        """The weights are complete: let go of what was needed to read them. Views keep their files mapped."""
        self.checkpoint = Checkpoint({})
        self.staging = None
        if self.device.type != "cpu":  # there they would no longer lie in what they are mapped from
            lay_side_by_side(self.model)
            torch.cuda.empty_cache()
        gc.collect()

    def _streams(self, name: str) -> bool:
        """Whether a tensor is the weight of a layer that reads its rows wherever they lie."""
        path, _, attribute = name.rpartition(".")
        return attribute == "weight" and isinstance(self.model.get_submodule(path), StreamingLinear)

    def _read(self, node: Node, shard: Shard, rows_apart: bool) -> torch.Tensor:
        """This rank's part of a tensor: as it lies on CPU, else on the device, through a bounded buffer."""
        if self.device.type == "cpu":
            return read_shard(node, shard, self.rank, rows_apart=rows_apart)
        if self.staging is None:
            self.staging = Staging(self.device)
        part = self.staging.to_device(read_shard(node, shard, self.rank, copy=False))
        release(node)
        return part

    def save(self, directory: str, names: list[str], limit: int) -> list[WrittenFile]:
        """Write this rank's files of a sharded directory; the arguments are those of `write_rank`.

        Rank 0 emits the bytes that it wrote, tensor by tensor.
        """
        assert self.plan is not None
        return write_rank(Path(directory), self.plan, names, self.rank, limit, self._own_part, self.emit)

    def _own_part(self, tensor: TensorPlan) -> torch.Tensor:
        return get_tensor(self.model, tensor.name, tensor.is_buffer).detach()

    def export(self, names: list[str]) -> list[torch.Tensor]:
        """This rank's part of some stored tensors, on CPU."""
        assert self.plan is not None
        return [self._own_part(self.plan.tensors[name]).cpu() for name in names]
