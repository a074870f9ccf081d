"""A rank's share of the model, inside its worker. Its public methods are what the parent may call."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache

from parallelformers_ng.checkpoint.nodes import Node, release
from parallelformers_ng.checkpoint.reading import read_shard
from parallelformers_ng.checkpoint.sharded import write_rank
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.source import Checkpoint
from parallelformers_ng.checkpoint.staging import Staging
from parallelformers_ng.checkpoint.store import map_shards
from parallelformers_ng.checkpoint.writing import WrittenFile
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.recorder import CudaRecorder, Recorder
from parallelformers_ng.cuda_graphs.static_caches import handed_out
from parallelformers_ng.generation.caches import (
    CacheFacts,
    CacheTable,
    facts_of,
    map_handles,
    mapped,
    shows_every_write,
)
from parallelformers_ng.generation.growing import grow_in_place
from parallelformers_ng.generation.lockstep import LockStep, agreed_criteria
from parallelformers_ng.generation.randomness import Randomness
from parallelformers_ng.generation.state import Watch, watched_arguments
from parallelformers_ng.generation.streaming import EmittingStreamer
from parallelformers_ng.hooks.crossing import Noted
from parallelformers_ng.hooks.mounted import Mounted
from parallelformers_ng.kernels.installation import forget, install
from parallelformers_ng.kernels.operators import StreamingLinear, install_attention
from parallelformers_ng.sharding.inject import inject, set_config
from parallelformers_ng.sharding.own_heads import OwnHeads, gathered
from parallelformers_ng.sharding.plan import Shard, ShardPlan, TensorPlan
from parallelformers_ng.sharding.stored import StoredInParts
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor
from parallelformers_ng.sharding.wholeness import check_is_whole
from parallelformers_ng.wire.format import FileDescriptor, Handle
from parallelformers_ng.worker.call import Answer, Call
from parallelformers_ng.worker.memory import RankMemory, rank_memory


class ModelRunner:
    """Built empty when the worker starts; `build` and `attach` give it a model, another `build` replaces it."""

    def __init__(self, rank: int, world_size: int, device: torch.device, communicator: Communicator, emit: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.communicator = communicator
        self.emit = emit
        self.model: Any = None
        self.plan: ShardPlan | None = None
        self.checkpoint = Checkpoint({})
        self.aliases: dict[str, list[str]] = {}
        self.caches = CacheTable()
        self.hooks: Any = None
        self.staging: Staging | None = None
        self.captured: CapturedSteps | None = None
        if device.type == "cpu":
            install_attention()
            grow_in_place()
        gc.freeze()  # what was imported stays; a collection that walked it would take a fifth of a second

    def build(self, skeleton: Skeleton) -> None:
        """Build this rank's modules, still without weights. Everything that can fail without weights fails here."""
        self.drop()
        # Modelling code may also draw from these; seeded alike, the ranks draw alike.
        random.seed(0)
        np.random.seed(0)
        model, self.plan = skeleton.build()
        if self.device.type == "cpu":
            install(model, {layer.path for layer in self.plan.layers if layer.cls is StoredInParts})
        inject(model, self.plan, self.rank, self.communicator)
        self.model = model
        self.hooks = Mounted(model, self.device, lambda cache: self.caches.handle(handed_out(cache)))

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
        gc.collect()
        gc.freeze()  # the modules live as long as the model; a collection in a decode step need not walk them either

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

        def part(tensor: TensorPlan) -> torch.Tensor:
            return get_tensor(self.model, tensor.name, tensor.is_buffer)

        return write_rank(Path(directory), self.plan, names, self.rank, limit, part, self.emit)

    def export(self, names: list[str]) -> list[torch.Tensor]:
        """This rank's part of some stored tensors, on CPU."""
        assert self.plan is not None
        tensors = (self.plan.tensors[name] for name in names)
        return [get_tensor(self.model, tensor.name, tensor.is_buffer).detach().cpu() for tensor in tensors]

    def drop(self) -> None:
        """Let the model go; the worker is then ready for another."""
        held = self.model is not None
        self.model = None
        self.plan = None
        self.checkpoint = Checkpoint({})
        self.staging = None
        self.caches = CacheTable()
        self.hooks = None
        if self.captured is not None:
            self.captured.forget()
        if held:
            gc.unfreeze()  # modules are held in cycles
            gc.collect()
            gc.freeze()

    def run(self, call: Call) -> Answer:
        """Call a method of the model as its caller would have, with the caller's random state and configuration."""
        self._prepare(call)
        used: dict[int, Cache] = {}
        args, kwargs = map_handles((call.args, call.kwargs), lambda handle: self._take_cache(handle, used))
        watch = Watch(watched_arguments(kwargs)) if call.watched else None
        if watch is not None:
            watch.remember()
        args, kwargs = self._to_device((args, kwargs))
        if call.method == "generate":
            self._add_generation_hooks(kwargs, call)
        module = self.model.get_submodule(call.path)
        agreed = agreed_criteria(module) if call.method == "generate" else contextlib.nullcontext()
        with (
            torch.inference_mode(),
            self._autocast(call.autocast),
            Randomness(call.rng, self.device) as draws,
            agreed,
            self._capturing(module, call.captured) as uncaptured,
        ):
            output = getattr(module, call.method)(*args, **kwargs)
            output = mapped(output, (Cache, OwnHeads), lambda part: self._outgoing(part, used), in_place=True)
            if call.unsure:
                check_is_whole(output, self.communicator, call.path)
        return Answer(
            output=output,
            rng=draws.moved(),
            caches={number: facts_of(cache) for number, cache in used.items()},
            states=watch.changes() if watch is not None else {},
            uncaptured=uncaptured(),
            noted=None if call.hooks is None else self.noted(call.cache_block),
        )

    def noted(self, cache_block: int) -> Noted | None:
        """What the caller's forward hooks noted in the call with that block of caches, which may have failed."""
        return None if self.hooks is None else self.hooks.noted(cache_block)

    def recorder(self) -> Recorder | str:
        """What records decode steps here; where nothing does, why."""
        if self.device.type != "cuda":
            return "there is no CUDA device to capture on"
        if not self.communicator.capturable:
            return f"{type(self.communicator).__name__} exchanges through host memory, which no graph can have in it"
        return CudaRecorder(self.device)

    @contextlib.contextmanager
    def _capturing(self, module: Any, asked: bool) -> Iterator[Callable[[], str]]:
        """Within it, decode steps are captured if that is asked for. Gives what says afterwards why they were not."""
        if not asked:
            yield str
            return
        if self.captured is None:
            recorder = self.recorder()
            if isinstance(recorder, str):
                yield lambda: recorder
                return
            self.captured = CapturedSteps(recorder, self.communicator)
        captured = self.captured
        with captured.capturing(module):
            yield lambda: captured.reason

    def cache(
        self, number: int, method: str, args: tuple, kwargs: dict, block: int, half: str = ""
    ) -> tuple[Any, CacheFacts]:
        """Call a method of a cache that this rank holds, or of a half. Returns its result and what became of the whole
        cache."""
        self.caches.number_from(block)
        args, kwargs = self._to_device((args, kwargs))
        with torch.inference_mode():
            result = self.caches.run(number, method, args, kwargs, half)
        return result, facts_of(self.caches.get(number))

    def cache_facts(self, number: int) -> CacheFacts | None:
        """What a cache has become; None where it may have been written to in a way that its facts do not show."""
        cache = self.caches.get(number)
        return facts_of(cache) if shows_every_write(cache) else None

    def held_caches(self) -> int:
        """How many caches this rank holds."""
        return len(self.caches)

    def _prepare(self, call: Call) -> None:
        self.caches.free(call.freed_caches)
        self.caches.number_from(call.cache_block)
        if call.hooks is not None or self.hooks:
            self.hooks.mount(call.hooks, call.cache_block)
        if call.attributes or call.configs:
            self._take_changes(call.attributes, call.configs)

    def _take_cache(self, handle: Handle, used: dict[int, Cache]) -> Cache:
        if handle.kind == "new cache":
            (number, cache), half = handle.payload, ""
            self.caches.adopt(number, cache)
        else:
            number, half = handle.payload
        used[number] = self.caches.get(number)
        return self.caches.get(number, half)

    def _add_generation_hooks(self, kwargs: dict[str, Any], call: Call) -> None:
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, LockStep(self.communicator, self.emit.sequence)])
        if call.streams:
            kwargs["streamer"] = EmittingStreamer(self.emit)

    def _outgoing(self, part: Cache | OwnHeads, told: dict[int, Cache]) -> Any:
        """What the caller gets for a part of an output of which this rank has its own heads'."""
        return gathered(part) if isinstance(part, OwnHeads) else self.caches.handle(handed_out(part), told=told)

    def _take_changes(self, attributes: dict[tuple[str, str], Any], configs: dict[str, Any]) -> None:
        """What the caller set of modules, then what it changed of configurations, of which it may have set some."""
        for (path, name), value in attributes.items():
            setattr(self.model.get_submodule(path), name, value)
        for name, value in configs.items():
            set_config(self.model, name, value)
        if attributes:
            forget(self.model)
        names = [*(name for _, name in attributes), *configs]
        if self.captured is not None and not all("generation_config" in name for name in names):
            self.captured.forget()  # what was recorded went by what has changed

    def _autocast(self, dtype: torch.dtype | None) -> Any:
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

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
