"""Runs a rank's shard of the model in its worker. The parent calls the public methods of `ModelRunner`."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from parallelformers_ng.batching.round_messages import Round, RoundOutput
from parallelformers_ng.batching.rounds import RankBatch
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.kernel_trial import KernelTrial
from parallelformers_ng.cuda_graphs.modes import NO_DEVICE
from parallelformers_ng.cuda_graphs.recorder import CudaRecorder
from parallelformers_ng.cuda_graphs.static_caches import handed_out
from parallelformers_ng.errors import NotPortableError, ParallelError
from parallelformers_ng.generation.cache_kinds import keep_caches, take_kind
from parallelformers_ng.generation.caches import CacheTable, map_handles, mapped
from parallelformers_ng.generation.call_arguments import STATEFUL, roots_of, tensors_of
from parallelformers_ng.generation.deferred_stops import deferring
from parallelformers_ng.generation.lockstep import (
    CallersRandomness,
    LiveChanges,
    agreed_criteria,
    devices_alike,
    shared_draws,
)
from parallelformers_ng.generation.object_messages import Changes
from parallelformers_ng.generation.object_parts import make_resizable
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.generation.step_masks import known_masks
from parallelformers_ng.generation.streaming import EmittingStreamer
from parallelformers_ng.hooks.installed import InstalledHooks
from parallelformers_ng.kernels.operators import serve_stock_code
from parallelformers_ng.kernels.step_kernels import StepKernels, install_stacks
from parallelformers_ng.live_code.changes import AppliedChanges, differences
from parallelformers_ng.live_code.loaded_by_path import extend_path
from parallelformers_ng.live_code.packing import CodeChanges
from parallelformers_ng.runtime import titles
from parallelformers_ng.runtime.failures import Description, describe
from parallelformers_ng.sharding import look_ups
from parallelformers_ng.sharding.active_adapters import ActiveAdapters, layers_with_adapters
from parallelformers_ng.sharding.attributes import put_attribute, set_config
from parallelformers_ng.sharding.inject import inject
from parallelformers_ng.sharding.own_heads import OwnHeads, gathered
from parallelformers_ng.sharding.wholeness import check_is_whole
from parallelformers_ng.wire.frame import Handle
from parallelformers_ng.wire.message import unpack
from parallelformers_ng.worker.assistant import RankAssistant
from parallelformers_ng.worker.call import Answer, Assistance, Call
from parallelformers_ng.worker.caller_modes import callers_modes, changed_draws
from parallelformers_ng.worker.changed_state import StateReport, note_stores
from parallelformers_ng.worker.installing import install, install_kernels
from parallelformers_ng.worker.memory import RankMemory
from parallelformers_ng.worker.rank_state import RankState
from parallelformers_ng.worker.weights import RankWeights


class ModelRunner(RankWeights):
    """A rank's shard of a model, and the methods that the parent calls.

    A runner is empty when the worker starts. `build` and `attach` add a model; another `build` replaces the model. The
    constructor changes functions of torch and transformers in this process.

    Args:
        emit: function that sends the parent a value during a request; its attribute `sequence` is the request's number.

    Attributes:
        code: changes of the caller's code that this process has applied.
        adapters: active adapters; None before the first call of a model with adapters.
        alike: whether the devices of all ranks compute and draw identical numbers; see `devices_alike`.
        kernels: Triton kernels for CUDA graphs of decode steps; None if they do not support the model.
    """

    differences = staticmethod(differences)
    extend_path = staticmethod(extend_path)

    def __init__(self, rank: int, world_size: int, device: torch.device, communicator: Communicator, emit: Any) -> None:
        super().__init__(rank, device, emit)
        self.world_size = world_size
        self.communicator = communicator
        self.code = AppliedChanges()
        self.rank_state = RankState()
        self.assistant = RankAssistant(rank, device, emit, communicator)
        install(device)
        note_stores()
        gc.freeze()  # excludes imported objects from garbage collections, which would take 0.2 s

    def _clear(self) -> None:
        super()._clear()
        keep_caches(None)
        self.caches = CacheTable()
        self.hooks: Any = None
        self.adapters: ActiveAdapters | None = None
        self.alike = True
        self._running: tuple[int, ObjectState | None] = 0, None
        self.kernels: StepKernels | None = None

    def build(self, skeleton: Skeleton) -> None:
        """Build this rank's modules, still without weights. Errors that do not depend on weights are raised here."""
        self.drop()
        if skeleton.code is not None:
            self._take_code(skeleton.code)
        # Modelling code may draw from Python's and numpy's generators, and all ranks must draw the same numbers.
        random.seed(0)
        np.random.seed(0)
        model, self.plan = skeleton.build()
        if not self.code.of_step:
            install_kernels(model, self.plan, self.device)
            if self.device.type == "cuda" and self.plan.tiers is None:
                install_stacks(model)
        inject(model, self.plan, self.rank, self.communicator)
        keep_caches(self.plan.cache)
        self.alike = devices_alike(self.communicator, self.device)
        self.hold(model)
        self.hooks = InstalledHooks(model, self._outgoing)
        self.kernels = StepKernels.of(model, self.device)
        titles.show(f"rank {self.rank} of {self.communicator.world_size}, {type(model).__name__}")

    def put_state(self, tensors: dict[str, torch.Tensor]) -> None:
        super().put_state(tensors)
        self.rank_state.invalidate(self.model)

    def drop(self) -> None:
        """Delete the model, so that the worker can build another model."""
        had_model = self.model is not None
        self.rank_state.drop(self.model)
        self._clear()
        self.assistant.drop()
        titles.show(f"rank {self.rank} of {self.communicator.world_size}")
        self.code.undo()
        serve_stock_code(True)
        if had_model:
            gc.collect()  # modules are in reference cycles, which only the collector frees
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # other processes may need the memory that torch's allocator keeps

    def run(self, call: Call) -> Answer | StateReport | None:
        """Run a method of the model for the caller, with the caller's random state, configuration and adapters. Ranks
        other than rank 0 return only what calls have changed in the model."""
        self._prepare(call)
        with self.state.during(self.emit.sequence, call.confirmed):
            answer = self._run(call)
        answer.changes = self.state.report(self.emit.sequence)
        return answer if self.rank == 0 else answer.changes

    def _run(self, call: Call) -> Answer:
        used: set[int] = set()
        args, kwargs = call.args, call.kwargs
        followed, state, live = call.followed, None, None
        if followed is not None:
            state = ObjectState.on_rank(followed, roots_of(args, kwargs))
            live = LiveChanges(self.emit, state) if followed.is_live else None
        self._running = call.cache_block, state
        tensors = tensors_of(args, kwargs)
        for tensor in tensors if self.state.has_own_code else ():
            make_resizable(tensor)
        before = [(tensor._version, tensor.shape) for tensor in tensors]
        if call.has_caches:
            args, kwargs = map_handles((args, kwargs), lambda handle: self._take_cache(handle, used))
        if call.streams:
            kwargs["streamer"] = EmittingStreamer(self.emit)
        module = self.model.get_submodule(call.path)
        if self.model.training and not self.alike:
            raise ParallelError(
                "the model is in training mode, and its devices are of different kinds, which would draw different"
                " dropout masks; call model.eval(), or use devices of one kind"
            )
        models = () if call.method == "forward" else self.generating
        assistant = kwargs.get("assistant_model")
        assistance = assistant if isinstance(assistant, Assistance) else None
        if assistance is not None:
            kwargs["assistant_model"] = self.assistant.take(assistance)
            models = [*models, *self.assistant.generating]
        with (
            torch.inference_mode() if call.grad is call.draws is None else callers_modes(call, self.communicator),
            contextlib.nullcontext() if self.device.type == "cpu" else self._on_device(models, kwargs),
            contextlib.nullcontext() if call.autocast is None else torch.autocast(self.device.type, call.autocast),
            CallersRandomness(call.rng, self.device) as draws,
            agreed_criteria(models, self.communicator, self.emit.sequence, self.alike, live),
            shared_draws(self.communicator, self.alike),
            self._capturing(module, call.captured) as uncaptured,
        ):
            output = getattr(module, call.method)(*args, **kwargs)
            if type(output) is not torch.Tensor:
                output = mapped(output, (Cache, OwnHeads), lambda part: self._outgoing(part, used), in_place=True)
            if call.unsure:
                check_is_whole(output, self.communicator, call.path)
        self._running = 0, None  # the objects of the call may be large, so do not keep them
        return Answer(
            output=output,
            rng=draws.moved(),
            caches={number: self.caches.info(number) for number in used},
            states=None if state is None else state.changes(),
            written={i: each for i, each in enumerate(tensors) if (each._version, each.shape) != before[i]},
            uncaptured=uncaptured(),
            hook_changes=None if call.hooks is None else self.hooks.changes(call.cache_block),
            draws=None if call.draws is None else changed_draws(call.draws),
            assistant_settings={} if assistance is None else self.assistant.changed_settings(),
        )

    def changes_of_failed(self, number: int) -> Changes | None:
        """Return what the call with this number, which raised an error, changed in its arguments."""
        (running, state), self._running = self._running, (0, None)
        return None if state is None or running != number else state.changes()

    def decode_rows(self, order: Round) -> RoundOutput:
        """Run one round of a batch, and return this rank's report; see `RankBatch.run`."""
        self._prepare(Call("", "generate", (), {}, adapters=order.adapters))
        calls: dict[int, tuple[dict[str, Any], ObjectState] | Description] = {}
        for number, (data, outside, _) in order.joins.items():
            try:
                call: Call = unpack(data, outside, self.device)
                self._prepare(call)
                followed, roots = call.followed, roots_of((), call.kwargs)
                objects = ObjectState(()) if followed is None else ObjectState.on_rank(followed, roots)
                calls[number] = call.kwargs, objects
            except NotPortableError as error:
                calls[number] = describe(error)
        steps = functools.partial(self._captured_steps, "rows")
        batch = self.rank_state.batch = self.rank_state.batch or RankBatch(self.model, self.communicator, steps)
        on_device = contextlib.nullcontext() if self.device.type == "cpu" else self._on_device((), {}, at_end=False)
        try:
            with torch.inference_mode(), on_device:
                return batch.run(order, calls)
        except BaseException:
            batch.forget_rows()
            raise

    def recorder(self) -> CudaRecorder | str:
        """Return a recorder that captures decode steps as CUDA graphs, or the reason why this rank cannot capture."""
        if self.device.type != "cuda":
            return NO_DEVICE
        if not self.communicator.capturable:
            return (
                f"{type(self.communicator).__name__} exchanges through host memory, which a CUDA graph cannot contain"
            )
        return CudaRecorder(self.device)

    @contextlib.contextmanager
    def _on_device(self, models: Sequence[Any], kwargs: dict[str, Any], at_end: bool = True) -> Iterator[None]:
        """Keep the host from waiting for the device inside the `with` block.

        Token ids and the end of a generation are checked late. With `at_end=False`, the request checks the ids itself.
        """
        watched = self.hooks.present or any(kwargs.get(name) is not None for name in STATEFUL)
        try:
            with look_ups.checked_look_ups(at_end), known_masks(models), deferring(not watched):
                yield
        except torch.OutOfMemoryError:
            self.rank_state.forget_steps()  # the next request may need the memory of the CUDA graphs
            raise

    @contextlib.contextmanager
    def _capturing(self, module: Any, wanted: bool) -> Iterator[Callable[[], str]]:
        """Capture decode steps inside the `with` block, if `wanted`. Yield a function that says why none was."""
        captured = self._captured_steps("call") if wanted else ""
        if isinstance(captured, str):
            yield lambda: captured
            return
        with captured.capturing(module):
            yield lambda: captured.reason

    def _captured_steps(self, kind: str) -> CapturedSteps | str:
        """Return the CUDA graphs for a kind of call ("call" or "rows"), or the reason why none can be captured."""
        if kind not in self.rank_state.steps:
            recorder = self.recorder()
            if isinstance(recorder, str):
                return recorder
            self.rank_state.steps[kind] = CapturedSteps(recorder, self.communicator)
        steps = self.rank_state.steps[kind]
        if self.rank_state.trial is None and self.kernels is not None:
            self.rank_state.trial = KernelTrial(self.kernels, steps.recorder, self.communicator)
        steps.trial = self.rank_state.trial
        return steps

    def _prepare(self, call: Call) -> None:
        if call.freed_caches:
            self.caches.free(call.freed_caches)
        self.caches.last_number = call.cache_block
        if call.code is not None:
            self._take_code(call.code)
            self.rank_state.invalidate(self.model)
        if call.hooks is not None or self.hooks.present:
            self.hooks.install(call.hooks, call.cache_block)
            # Hooks change what the model computes, so kept data is no longer valid.
            self.rank_state.invalidate(self.model)
        if call.attributes or call.configs or call.environment:
            self._take_changes(call)
        if call.adapters is not None and call.adapters != self.adapters:
            call.adapters.activate(layers_with_adapters(self.model))
            self.adapters = call.adapters
            self.rank_state.invalidate(self.model)

    def _take_code(self, changes: CodeChanges) -> None:
        self.code.apply(changes, self.model)
        serve_stock_code(not self.code.of_step)

    def _take_cache(self, handle: Handle, used: set[int]) -> Cache:
        if handle.kind == "new cache":
            (number, cache), subcache = handle.payload, ""
            self.caches.adopt(number, take_kind(cache))
        else:
            number, subcache = handle.payload
        used.add(number)
        return self.caches.get(number, subcache)

    def _outgoing(self, part: Cache | OwnHeads, known: Container[int] = ()) -> Any:
        """Prepare a value for the caller: make a `Handle` for a cache, and gather all heads of attention weights."""
        return gathered(part) if isinstance(part, OwnHeads) else self.caches.handle(handed_out(part), known)

    def _take_changes(self, call: Call) -> None:
        for (path, name), value in call.attributes.items():
            put_attribute(self.model.get_submodule(path), name, value)
        for name, value in call.configs.items():
            set_config(self.model, name, value)
        self.set_environment(call.environment)
        self.state.look_at_settings()
        names = [*(name for _, name in call.attributes), *call.configs, *call.environment]
        if not all("generation_config" in name for name in names):
            self.rank_state.invalidate(self.model)

    @staticmethod
    def set_environment(changes: dict[str, str | None]) -> None:
        for name, text in changes.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text

    def ping(self) -> list[int]:
        """Return the numbers of all ranks, gathered with the same communicator as in decode steps."""
        return self.communicator.all_gather(torch.tensor([self.rank], device=self.device)).tolist()

    def memory(self, what: str, name: str) -> Any:
        """Call the method `what` of `RankMemory` for this rank's device, which the caller calls `name`."""
        plans = [plan for plan in (self.plan, self.assistant.plan) if plan is not None]
        memory = RankMemory(self.device, name, sum(plan.bytes_in("device", self.rank) for plan in plans))
        return getattr(memory, what)()
