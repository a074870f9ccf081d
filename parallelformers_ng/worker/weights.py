"""Manages the weights of a rank: reads weights from shared memory or files, saves them and exports them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.nodes import Node, release
from parallelformers_ng.checkpoint.reading import read_shard
from parallelformers_ng.checkpoint.sharded_directory import write_rank
from parallelformers_ng.checkpoint.staging import Staging
from parallelformers_ng.checkpoint.store import map_shards
from parallelformers_ng.checkpoint.writing import WrittenFile
from parallelformers_ng.kernels.operators import StreamingLinear
from parallelformers_ng.kernels.side_by_side import lay_side_by_side
from parallelformers_ng.offload.moves import CopiedLayer, MappedLayer, Moves
from parallelformers_ng.offload.pages import make_huge
from parallelformers_ng.runtime.freed_memory import TRIM_EVERY, give_back_freed
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import Shard, TensorPlan
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor
from parallelformers_ng.sharding.tiers import Place, Tiers
from parallelformers_ng.wire.frame import FileDescriptor
from parallelformers_ng.worker.changed_state import ChangedState, StateReport


class RankWeights:
    """Base class of `ModelRunner` that loads, saves and exports weights.

    Attributes:
        checkpoint: files from which `load` reads weights; empty after `loaded`.
        aliases: storage name of a tensor → all names of the tensor.
        staging: buffer for copies to the device; None while no copy needs the buffer.
        moves: loads offloaded layers when they run; None if all layers stay on the device.
        state: tracks changes that calls make to the model; None before `loaded`.
    """

    moves: Moves | None = None

    def __init__(self, rank: int, device: torch.device, emit: Any) -> None:
        self.rank = rank
        self.device = device
        self.emit = emit
        self._clear()

    def _clear(self) -> None:
        self.model: Any = None
        self.generating: list[Any] = []
        self.plan: ShardPlan | None = None
        self.state: Any = None
        self.checkpoint = Checkpoint({})
        self.aliases: dict[str, list[str]] = {}
        self.staging: Staging | None = None
        if self.moves is not None:
            self.moves.close()
        self.moves = None

    def hold(self, model: nn.Module) -> None:
        self.model = model
        self.generating = [module for module in model.modules() if isinstance(module, GenerationMixin)]

    def attach(self, fds: Sequence[FileDescriptor], checkpoint: Checkpoint) -> None:
        """Take the weights that are in the parent's shared memory. A CPU rank maps them. A CUDA rank copies them to its
        device, except weights that stay on disk.

        Args:
            fds: descriptors of the shared memory, see `map_shards`; they are closed, also after an error.
            checkpoint: files with all other weights, which `load` reads.
        """
        assert self.plan is not None, "build comes before attach"
        self.checkpoint = checkpoint
        self.aliases = self.plan.aliases()
        plan = self.checkpoint.in_memory(self.plan)
        try:
            mapped = map_shards(plan, self.rank, [descriptor.fd for descriptor in fds])
        finally:
            for descriptor in fds:
                descriptor.close()
        if self.device.type != "cpu":
            mapped = {name: self._for_device(name, tensor) for name, tensor in mapped.items()}
        for name, tensor in plan.tensors.items():
            set_tensor(self.model, name, mapped[tensor.storage], tensor.is_buffer)

    def load(self, names: list[str]) -> None:
        """Read this rank's shards of stored tensors from the checkpoint's files. A shard is mapped if a file has it in
        the form that this rank needs, and copied otherwise."""
        assert self.plan is not None
        pending = 0
        for stored in names:
            node = self.checkpoint.nodes[stored]
            aliases = self.aliases[stored]
            part = self._read(stored, node, self.plan.tensors[stored].shards[self.rank])
            for name in aliases:
                set_tensor(self.model, name, part, self.plan.tensors[name].is_buffer)
            pending += part.nbytes
            if pending >= TRIM_EVERY:
                give_back_freed()
                pending = 0

    def loaded(self) -> None:
        """Finish loading after the last weight, and close the readers. Mapped files stay mapped."""
        self.checkpoint = Checkpoint({})
        self.staging = None
        if self.device.type != "cpu" and self.plan is not None and self.plan.tiers is None:
            lay_side_by_side(self.model)  # only on CUDA: on CPU a copy of a weight would no longer be a mapped file
        self._move_layers()
        gc.collect()
        give_back_freed()
        if self.device.type == "cpu" and self.moves is None:
            make_huge([*self.model.parameters(), *self.model.buffers()])
        assert self.plan is not None
        self.state = ChangedState(self.model, self.plan, self.rank)

    def put_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Set this rank's shards of tensors that earlier calls have changed. `tensors`: storage name → shard."""
        self.state.put({name: tensor.to(self.device) for name, tensor in tensors.items()})

    def state_changes(self) -> StateReport | None:
        report: StateReport | None = self.state.report(self.emit.sequence)
        return report

    def _move_layers(self) -> None:
        layers: list[MappedLayer] = []
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        staging: Staging | None = None
        for path, stored in () if self._tiers is None else self._tiers.moved(self.rank):
            module = self.model.get_submodule(path)
            owners = [name.rpartition(".") for each in stored for name in self.aliases[each]]
            places = [(self.model.get_submodule(owner)._parameters, name) for owner, _, name in owners]
            if stream is None:
                layers.append(MappedLayer(module, [table[name] for table, name in places]))
            else:
                on_disk = self._place(stored[0]) == "disk"
                staging = staging or Staging(self.device) if on_disk else staging
                layers.append(CopiedLayer(module, places, staging if on_disk else None, self.device, stream))
        self.moves = Moves(layers) if layers else None

    def _streams(self, name: str) -> bool:
        """Whether a tensor is the weight of a `StreamingLinear`, whose rows need not be adjacent in memory."""
        path, _, attribute = name.rpartition(".")
        return attribute == "weight" and isinstance(self.model.get_submodule(path), StreamingLinear)

    @property
    def _tiers(self) -> Tiers | None:
        return None if self.plan is None else self.plan.tiers

    def _place(self, stored: str) -> Place:
        """Return where a tensor is while its layer does not run: on the device, on the CPU or on disk."""
        return "device" if self._tiers is None else self._tiers.place(stored, self.rank)

    def _for_device(self, stored: str, tensor: torch.Tensor) -> torch.Tensor:
        # Copy to the device through a buffer of bounded size, or to page-locked RAM. A tensor on disk stays a mapped
        # file.
        place = self._place(stored)
        if place == "disk":
            return tensor
        if place == "cpu":
            return _pinned(tensor)
        self.staging = self.staging or Staging(self.device)
        return self.staging.to_device(tensor)

    def _read(self, stored: str, node: Node, shard: Shard) -> torch.Tensor:
        # A CPU rank with offloaded layers copies the shards of all other layers, so that the system cannot drop their
        # pages to make room for offloaded layers.
        if self._place(stored) == "disk":
            return read_shard(node, shard, self.rank)
        if self.device.type == "cpu":
            part = read_shard(node, shard, self.rank, rows_apart=all(map(self._streams, self.aliases[stored])))
            if self._tiers is None:
                return part
            part = part.clone()
        else:
            part = self._for_device(stored, read_shard(node, shard, self.rank, copy=False))
        release(node)
        return part

    def save(self, directory: str, names: list[str], limit: int) -> list[WrittenFile]:
        """Write this rank's files of a sharded directory, of at most `limit` bytes each."""
        assert self.plan is not None
        return write_rank(Path(directory), self.plan, names, self.rank, limit, self._own_part, self.emit)

    def _own_part(self, tensor: TensorPlan) -> torch.Tensor:
        return get_tensor(self.model, tensor.name, tensor.is_buffer).detach()

    def export(self, names: list[str]) -> list[torch.Tensor]:
        """Return this rank's shard of each stored tensor in `names`, on CPU and still quantized."""
        assert self.plan is not None
        return [self._own_part(self.plan.tensors[name]).cpu() for name in names]


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in page-locked memory, so that copies to a device are asynchronous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
