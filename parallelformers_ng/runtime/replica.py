"""A rank's share of the model, inside its worker. Its public methods are what the parent may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import map_shards
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.memory import RankMemory, rank_memory
from parallelformers_ng.runtime.leaves import FileDescriptor
from parallelformers_ng.sharding.inject import inject, set_tensor
from parallelformers_ng.sharding.plan import ShardPlan


class Replica:
    """Built empty when the worker starts; `build` and `attach` give it a model, another `build` replaces it."""

    def __init__(
        self, rank: int, world_size: int, device: torch.device, communicator: Communicator, emit: Callable[[Any], None]
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.communicator = communicator
        self.emit = emit
        self.model: Any = None
        self.plan: ShardPlan | None = None

    def build(self, skeleton: Skeleton) -> None:
        """Build this rank's modules, still without weights. Everything that can fail without weights fails here."""
        self.drop()
        model, self.plan = skeleton.build()
        inject(model, self.plan, self.rank, self.communicator)
        self.model = model

    def attach(self, own: FileDescriptor, shared: FileDescriptor) -> None:
        """Take the weights: mapped on CPU, copied to the device on CUDA."""
        assert self.plan is not None, "build comes before attach"
        try:
            held = map_shards(self.plan, self.rank, own.fd, shared.fd)
        finally:
            own.close()
            shared.close()
        if self.device.type != "cpu":
            held = {name: tensor.to(self.device) for name, tensor in held.items()}
        for name, tensor in self.plan.tensors.items():
            set_tensor(self.model, name, held[tensor.storage], tensor.is_buffer)

    def drop(self) -> None:
        """Let the model go; the worker is then ready for another."""
        self.model = None
        self.plan = None

    def run(self, method: str, args: tuple, kwargs: dict, training: bool, rng: torch.Tensor | None) -> tuple[Any, Any]:
        """Call a method of the model.

        Args:
            training: the mode the model is in at the caller.
            rng: state of the caller's generator, a uint8 vector, or None where the call draws nothing.

        Returns:
            What the method returned, and the generator's state afterwards where it moved, else None.
        """
        if self.model.training != training:
            self.model.train(training)
        if rng is not None:
            torch.set_rng_state(rng.clone())  # the generator reads it as a struct, which must be aligned
        args, kwargs = self._to_device((args, kwargs))
        with torch.inference_mode():
            output = getattr(self.model, method)(*args, **kwargs)
        if rng is None:
            return output, None
        after = torch.get_rng_state()
        return output, None if torch.equal(after, rng) else after

    def memory(self) -> RankMemory:
        """Bytes that this rank holds."""
        return rank_memory(self.device, self.plan.bytes_per_rank[self.rank] if self.plan else 0, self.rank)

    def _to_device(self, value: Any) -> Any:
        if self.device.type == "cpu":
            return value
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_device(item) for item in value)
        if isinstance(value, dict):
            return {key: self._to_device(item) for key, item in value.items()}
        return value
