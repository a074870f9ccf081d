"""From a method call on the parallelized model to a `Call` for the workers, and from their `Answer` back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers.cache_utils import Cache

from parallelformers_ng.cuda_graphs.modes import StaticSteps, check_compiler, eager_generation, static_generation
from parallelformers_ng.errors import NotPortableError, ParallelError, WorkerError
from parallelformers_ng.generation.caches import PLAIN, map_caches, map_handles
from parallelformers_ng.generation.object_state import STATEFUL, ObjectState, stateful_arguments
from parallelformers_ng.generation.streaming import deliver
from parallelformers_ng.hooks.registry import CallHooks, HookRegistry
from parallelformers_ng.model.deployment import Deployment
from parallelformers_ng.model.edits import Edits
from parallelformers_ng.model.marks import has_own_loop, own_loop
from parallelformers_ng.model.shared_calls import SharedCalls
from parallelformers_ng.options import BatchingOptions, checked_seconds
from parallelformers_ng.runtime.deadline import deadline
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.supervisor import Supervisor
from parallelformers_ng.sharding.tensors import is_within
from parallelformers_ng.wire.interrupts import CriticalSection
from parallelformers_ng.worker.call import Answer, Call

log = logging.getLogger("parallelformers_ng")

Stream = tuple[torch.Tensor, Callable[[torch.Tensor], object]]
"""The state of a random stream, and what takes its state afterwards."""


@dataclass(frozen=True)
class CallOptions:
    """What is asked of one call alone.

    Attributes:
        seed: where its random stream begins; None follows the model's, or the caller's generator.
        timeout: seconds until it must be done; None is the group's.
        streamer: is given the tokens as they are chosen.
        captured, unsure: as in `Call`.
    """

    seed: int | None = None
    timeout: float | None = None
    streamer: Any = None
    captured: bool = False
    unsure: bool = False


class Dispatcher:
    """Turns calls into requests for one model.

    Args:
        model: the parallelized model.
        deployment: its workers.
        seed: seeds a stream of its own for the model; None follows the caller's generator.
        steps: how the decode steps are compiled or captured, None where they are not.
        batching: how many calls of `generate` are decoded together, None where each runs alone.
        prove_at_once: see `Trial`.
    """

    def __init__(
        self,
        model: Any,
        deployment: Deployment,
        seed: int | None = None,
        steps: StaticSteps | None = None,
        batching: BatchingOptions | None = None,
        prove_at_once: bool = True,
    ) -> None:
        self.deployment = deployment
        self._edits = Edits(model)
        self._stream = None if seed is None else torch.Generator().manual_seed(seed)
        self._follower = threading.RLock()  # of who draws from that stream, or from the caller's generator
        self._draws = itertools.count()
        self._steps = steps
        self.hooks = HookRegistry(model, deployment.plan)
        self._said: set[tuple[str, int]] = set()
        self._workers = functools.partial(_ready, deployment.supervisor)
        self.shared: SharedCalls | None = None
        if batching is not None:
            self.shared = SharedCalls(deployment, self._edits, self._workers, batching, prove_at_once)

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """Have the workers set an attribute of a module before the next call.

        Raises:
            ParallelError: the ranks have values of their own for it.
        """
        for layer in self.deployment.plan.layers:
            if layer.path == path and any(is_within(each, name) for each in layer.attributes[0]):
                raise ParallelError(
                    f"{path}.{name} is cut, each worker has its own; set it before parallelize, or deparallelize()"
                    " first"
                )
        self._edits.set_attribute(path, name, value)

    def call(
        self, model: Any, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], how: CallOptions
    ) -> Any:
        """Run a method on the workers.

        Args:
            path: dotted path of the module, "" for the model.
            method: its method.
            how: what is asked of this call alone.

        Raises:
            NotPortableError: an argument cannot cross by value; nothing was run.
            GroupError: see its subclasses.
        """
        supervisor = self.deployment.supervisor
        end = supervisor.current[0].deadline(how.timeout)
        with self.hooks.turn(end) if self._may_be_hooked() else contextlib.nullcontext() as hooks:
            # The group comes first: what is sent below is right for this incarnation of the workers, and for no other.
            workers = self._workers(end)
            streams = how.streamer is not None
            call = Call(path, method, args, kwargs, unsure=how.unsure, streams=streams, captured=how.captured)
            # What is noted here, and what the workers have done, must not part.
            with CriticalSection(), self._random_stream(how.seed) as stream:
                return self._request(model, call, how, end, hooks, workers, stream)

    def _may_be_hooked(self) -> bool:
        return bool(self.hooks.paths) or torch_module._has_any_global_hook()

    def _request(
        self,
        model: Any,
        call: Call,
        how: CallOptions,
        end: float,
        hooks: CallHooks | None,
        workers: tuple[WorkerGroup, int],
        stream: Stream,
    ) -> Any:
        """Send a call, with all that the workers of this incarnation do not know yet, and take the answer in."""
        group, incarnation = workers
        registry, caches = self.deployment.caches, dict[int, Cache]()
        if not all(isinstance(value, PLAIN) for value in (*call.args, *call.kwargs.values())):
            call.args, call.kwargs = map_caches((call.args, call.kwargs), lambda cache: registry.send(cache, caches))
            call.has_caches = bool(caches)
        state = None
        if any(call.kwargs.get(name) is not None for name in STATEFUL):
            state = ObjectState(stateful_arguments(call.kwargs))
            call.returns_state = bool(state.parts)
        if hooks is not None:
            if state is not None:
                hooks.check_apart_from(state)
            call.hooks = hooks.packed
        call.rng = stream[0].numpy().tobytes()
        call.autocast = torch.get_autocast_dtype(group.device) if torch.is_autocast_enabled(group.device) else None
        call.configs, call.attributes, arrived = self._edits.changes(model, incarnation)
        call.cache_block = next(registry.blocks)
        if registry.unwanted:
            call.freed_caches = registry.take_freed()
        on_event = None if how.streamer is None else functools.partial(deliver, how.streamer)
        try:
            answer: Answer = group.call("run", call, timeout=end - time.monotonic(), on_event=on_event, to_devices=True)
            arrived()
            if answer.rng is not None:
                stream[1](answer.rng.clone())  # torch wants its own storage
            if state is not None:
                state.restore(answer.states)
            if hooks is not None:
                hooks.bring_home(answer.hook_changes, lambda handle: registry.receive(handle, incarnation))
            if answer.uncaptured:
                self._not_captured(answer.uncaptured)
            for number, info in answer.caches.items():
                registry.refresh(caches.get(number), incarnation, number, info)
            if type(answer.output) is torch.Tensor:
                return answer.output
            return map_handles(answer.output, lambda handle: registry.receive(handle, incarnation))
        except BaseException as error:  # an interrupt may come as late as here
            if hooks is not None and isinstance(error, WorkerError) and group.alive:
                changes = group.call("hook_changes", call.cache_block, timeout=end - time.monotonic())
                hooks.bring_home(changes, lambda handle: registry.receive(handle, incarnation))
            registry.free_after_failure(incarnation, [*call.freed_caches, call.cache_block], caches)
            raise

    def generating(
        self, module: Any, name: str, original: Callable[..., Any], call: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a method of the modelling code that calls `generate`: on the workers, but in this process where an
        argument cannot cross to them, and where the loop of a `generate` around it runs here, with the same objects.

        Args:
            module: the model, or a model within it.
            name, original: the method, and its class's.
            call: runs it on the workers.
        """
        if not has_own_loop():
            try:
                return call()
            except NotPortableError as error:
                self._say_once(f"{name} runs in this process, a request per token, which is slower", str(error))
        return original(module, *args, **kwargs)

    def generate(
        self, model: Any, path: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`generate` on the workers; in this process, one forward per request, where something cannot cross to them.

        Args:
            path: of the model, or of the model within it, that generates.
            original: its class's `generate`.
        """
        module = model.get_submodule(path)
        bound = inspect.signature(original).bind_partial(module, *args)
        named = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
        merged = {**named, **kwargs}
        own = {name: merged.pop(name, None) for name in ("seed", "timeout", "streamer")}
        how = CallOptions(**own)
        if merged.get("assistant_model") is not None:
            return self._generate_here(module, original, merged, how)
        if path or self.shared is None or not self._may_share(self.shared):
            return self._generate_alone(model, path, original, merged, how)
        # Beside others a call has no place in the order in which the caller's generator is drawn from.
        draw_seed = self._draw_seed if self.shared.queue.busy or self.deployment.supervisor.current[0].busy else None
        try:
            found = self.shared.generate(module, merged, how.seed, how.timeout, how.streamer, draw_seed)
        except NotPortableError as error:
            return self._generate_instead(module, original, merged, how, error)
        if not isinstance(found, str):
            return found
        log.debug("generate runs alone: %s", found)
        return self._generate_alone(model, path, original, merged, how)

    def _may_share(self, shared: SharedCalls) -> bool:
        """By default calls share a batch from when two first come at the same time: others need no proof."""
        if not shared.trial.is_due and not self.deployment.supervisor.current[0].busy:
            return False
        return not (self._may_be_hooked() or has_own_loop() or torch.is_autocast_enabled("cpu"))

    def _generate_alone(
        self, model: Any, path: str, original: Callable[..., Any], given: dict[str, Any], how: CallOptions
    ) -> Any:
        module, steps = model.get_submodule(path), None if path else self._steps
        as_they_are = given
        if self.deployment.supervisor.current[0].device == "cuda":
            check_compiler(module, given, self.deployment.plan.world_size)
            as_they_are = eager_generation(module, given)
        sent, reason = (as_they_are, "") if steps is None else static_generation(module, given, steps)
        if steps is not None and (reason := "its modules have forward hooks" if self.hooks.paths else reason):
            self._say_once(steps.without, reason, logging.INFO if steps.by_default else logging.WARNING)
            sent = as_they_are
        there = replace(how, captured=steps is not None and steps.captured and not reason)
        try:
            return self.call(model, path, "generate", (), sent, there)
        except NotPortableError as error:
            return self._generate_instead(module, original, given, how, error)
        except torch.OutOfMemoryError as error:
            if not (there.captured and self._not_captured(str(error).partition("\n")[0])) or how.streamer is not None:
                raise  # what was streamed cannot be taken back
            return self.call(model, path, "generate", (), as_they_are, how)

    def _not_captured(self, why: str) -> bool:
        """Take in that steps could not be captured. Where nobody asked for it, no more are: returns True."""
        steps = self._steps
        if steps is None:
            return False
        self._say_once(steps.without, why)
        if steps.by_default:
            self._steps = None
            self._workers(self.deployment.supervisor.current[0].deadline())[0].call("forget_steps")
        return steps.by_default

    def _generate_instead(
        self, model: Any, original: Callable[..., Any], kwargs: dict[str, Any], how: CallOptions, why: Exception
    ) -> Any:
        self._say_once("generate runs its loop in this process, a request per token, which is slower", str(why))
        return self._generate_here(model, original, kwargs, how)

    def _generate_here(self, model: Any, original: Callable[..., Any], kwargs: dict[str, Any], how: CallOptions) -> Any:
        if how.streamer is not None:
            kwargs = {**kwargs, "streamer": how.streamer}
        # The time is that of the whole loop, not of each of its requests.
        limit = deadline(checked_seconds(how.timeout, "timeout")) if how.timeout else contextlib.nullcontext()
        if how.seed is None and self._stream is None:
            with limit, own_loop():
                return original(model, **kwargs)
        with limit, self._random_stream(how.seed) as (before, store):
            with own_loop(), torch.random.fork_rng(devices=[]):
                torch.set_rng_state(before)
                output = original(model, **kwargs)
                after = torch.get_rng_state()
            store(after)
        return output

    def _say_once(self, what: str, why: str, level: int = logging.WARNING) -> None:
        if (what, level) not in self._said:
            self._said.add((what, level))
            log.log(level, "%s: %s", what, why)

    @contextlib.contextmanager
    def _random_stream(self, seed: int | None) -> Iterator[Stream]:
        """Gives the state to start from, and what takes the state afterwards."""
        if seed is None and not self._follower.acquire(blocking=False):
            seed = self._draw_seed()  # from where the call began that follows the generator, this would draw the same
        if seed is not None:
            yield torch.Generator().manual_seed(seed).get_state(), lambda after: None
            return
        stream = self._stream or torch.default_generator
        try:
            yield stream.get_state(), stream.set_state
        finally:
            self._follower.release()

    def _draw_seed(self) -> int:
        """For a call beside others: each has its own, and the generator that they do not follow stays as it is."""
        state = (self._stream or torch.default_generator).get_state()
        return zlib.crc32(state.numpy()) << 32 | next(self._draws)


def _ready(supervisor: Supervisor, end: float) -> tuple[WorkerGroup, int]:
    """The group that is ready, and its incarnation; waits for it where it is being started again."""
    workers = supervisor.current
    return workers if workers[0].ready else supervisor.ready(end)
