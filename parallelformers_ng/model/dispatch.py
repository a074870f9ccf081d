"""From a method call on the parallelized model to a `Call` for the workers, and from their `Answer` back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers.cache_utils import Cache

from parallelformers_ng.cuda_graphs.modes import StaticSteps, check_compiler, eager_generation, static_generation
from parallelformers_ng.errors import NotPortableError, WorkerError
from parallelformers_ng.generation.caches import PLAIN, map_caches, map_handles
from parallelformers_ng.generation.object_state import STATEFUL, ObjectState, stateful_arguments
from parallelformers_ng.generation.streaming import deliver
from parallelformers_ng.hooks.registry import CallHooks, HookRegistry
from parallelformers_ng.model.adapters import Adapters
from parallelformers_ng.model.edits import Edits
from parallelformers_ng.model.marks import has_own_loop, own_loop
from parallelformers_ng.model.random_stream import RandomStream, Stream
from parallelformers_ng.model.replica import Replica
from parallelformers_ng.model.row_steps import RowSteps
from parallelformers_ng.model.shared_calls import SharedCalls
from parallelformers_ng.options import checked_seconds
from parallelformers_ng.runtime.deadline import deadline
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.wire.interrupts import CriticalSection
from parallelformers_ng.worker.call import Answer, Call

log = logging.getLogger("parallelformers_ng")


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
    """Turns calls of a model into requests for one group of workers.

    Args:
        model: the parallelized model.
        replica: the workers.
        plan: how the model is cut.
        stream: what calls without a seed follow.
        hooks: the caller's.
        adapters: the model's, None where it has none.
        steps: how the decode steps are compiled or captured, None where they are not.
        share: makes what decodes calls of `generate` together; None where each runs alone.

    Attributes:
        shared: the calls that are decoded together.
        edits: what the workers do not know yet of the model's settings.
    """

    def __init__(
        self,
        model: Any,
        replica: Replica,
        plan: ShardPlan,
        stream: RandomStream,
        hooks: HookRegistry,
        adapters: Adapters | None,
        steps: StaticSteps | None,
        share: Callable[[Replica, Edits, Adapters | None, RowSteps], SharedCalls] | None,
    ) -> None:
        self.replica = replica
        self.edits = Edits(model)
        self._world_size = plan.world_size
        self._stream = stream
        self._hooks = hooks
        self._adapters = adapters
        self._steps = steps
        self._said: set[tuple[str, int]] = set()
        self.shared = None if share is None else share(replica, self.edits, adapters, RowSteps(steps, hooks))

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
        end = self.replica.deadline_of(how.timeout)
        with self._hooks.turn(end) if self._may_be_hooked() else contextlib.nullcontext() as hooks:
            # The group comes first: what is sent below is right for this incarnation of the workers, and for no other.
            workers = self.replica.ready(end)
            streams = how.streamer is not None
            call = Call(path, method, args, kwargs, unsure=how.unsure, streams=streams, captured=how.captured)
            # What is noted here, and what the workers have done, must not part.
            with CriticalSection(), self._stream.of_call(how.seed) as stream:
                return self._request(model, call, how, end, hooks, workers, stream)

    def _may_be_hooked(self) -> bool:
        return bool(self._hooks.paths) or torch_module._has_any_global_hook()

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
        registry, caches = self.replica.caches, dict[int, Cache]()
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
        call.configs, call.attributes, arrived = self.edits.changes(model, incarnation)
        call.adapters = None if self._adapters is None else self._adapters.active()
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
        draw_seed = self._stream.draw_seed if self.shared.queue.busy or self.replica.group.busy else None
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
        if not shared.trial.is_due and not self.replica.group.busy:
            return False
        return not (self._may_be_hooked() or has_own_loop() or torch.is_autocast_enabled("cpu"))

    def _generate_alone(
        self, model: Any, path: str, original: Callable[..., Any], given: dict[str, Any], how: CallOptions
    ) -> Any:
        module, steps = model.get_submodule(path), None if path else self._steps
        as_they_are = given
        if self.replica.group.device == "cuda":
            check_compiler(module, given, self._world_size)
            as_they_are = eager_generation(module, given)
        sent, reason = (as_they_are, "") if steps is None else static_generation(module, given, steps)
        if steps is not None and (reason := "its modules have forward hooks" if self._hooks.paths else reason):
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
            self.replica.call("forget_steps")
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
        if how.seed is None and not self._stream.is_own:
            with limit, own_loop():
                return original(model, **kwargs)
        with limit, self._stream.of_call(how.seed) as (before, store):
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
