"""The calls of a parallelized model: which replica serves one; whether `generate` runs alone, is decoded together with
others, or has its loop in this process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from parallelformers_ng.batching.batch_proof import Trial
from parallelformers_ng.cuda_graphs.modes import StaticSteps, check_compiler, eager_generation, static_generation
from parallelformers_ng.errors import NotPortableError, ParallelError
from parallelformers_ng.generation.cache_handle import CacheHandle
from parallelformers_ng.generation.caches import map_caches
from parallelformers_ng.generation.lost_notes import globals_written_by
from parallelformers_ng.generation.object_state import STATEFUL, stateful_arguments
from parallelformers_ng.hooks.pickling import described
from parallelformers_ng.hooks.registry import HookRegistry
from parallelformers_ng.live_code.watch import refuse_modes
from parallelformers_ng.model.adapter_state import Adapters
from parallelformers_ng.model.caller_state import RandomStream
from parallelformers_ng.model.deployment import Deployment
from parallelformers_ng.model.marks import has_own_loop, own_loop
from parallelformers_ng.model.replica import CallOptions, Dispatcher, may_be_hooked
from parallelformers_ng.model.row_steps import RowSteps
from parallelformers_ng.model.shared_calls import SharedCalls
from parallelformers_ng.options import BatchingOptions, checked_seconds
from parallelformers_ng.runtime.deadline import deadline
from parallelformers_ng.sharding.tensors import is_within

log = logging.getLogger("parallelformers_ng")


class Calls:
    """Carries the calls of one model.

    Args:
        model: the parallelized model.
        deployment: its workers and weights.
        seed: seeds a stream of its own for the model; None follows the caller's generator.
        steps: how the decode steps are compiled or captured, None if they are not.
        batching: how many calls of `generate` each replica decodes together, None if each call runs alone.
        prove_at_once: see `Trial`.

    Attributes:
        hooks: the caller's.
        adapters: the model's, None if it has none.
        dispatchers: one for each replica.
        shared: calls that are decoded together, for each replica; empty if each call runs alone.
    """

    def __init__(
        self,
        model: Any,
        deployment: Deployment,
        seed: int | None,
        steps: StaticSteps | None,
        batching: BatchingOptions | None,
        prove_at_once: bool,
    ) -> None:
        self.deployment = deployment
        self.hooks = HookRegistry(model, deployment.plan)
        self.adapters = Adapters.of(model)
        self._stream = RandomStream(seed)
        self._said: set[tuple[str, int]] = set()
        self.dispatchers = [
            Dispatcher(model, replica, self._stream, self.hooks, self.adapters, steps, deployment.code)
            for replica in deployment.replicas
        ]
        self.shared: list[SharedCalls] = []
        if batching is not None:
            trial = Trial(prove_at_once, deployment.code.check.edits)
            self.shared = [
                SharedCalls(batching, trial, each, self.adapters, RowSteps(steps, self.hooks))
                for each in self.dispatchers
            ]
        self._in_flight = [0] * len(self.dispatchers)
        self._lock = threading.Lock()

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
        for dispatcher in self.dispatchers:
            dispatcher.edits.set_attribute(path, name, value)

    def call(
        self, model: Any, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> Any:
        """Run a method on the workers of one replica. See `Dispatcher.call`."""
        refuse_modes()
        with self.with_adapters(), self._turn(args, kwargs) as place:
            return self.dispatchers[place].call(model, path, method, args, kwargs, options)

    def generate(
        self,
        model: Any,
        module: Any,
        path: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `generate` on the workers. If an argument cannot cross to them, run its loop here, a request a token.

        Args:
            model: the parallelized model.
            module: the model, or the model within it that generates.
            path: path of `module`.
            original: `generate` of its class.
        """
        refuse_modes()
        with self.with_adapters(), self._turn(args, kwargs) as place:
            bound = inspect.signature(original).bind_partial(module, *args)
            by_name = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
            arguments = {**by_name, **kwargs}
            options = CallOptions(**{name: arguments.pop(name, None) for name in ("seed", "timeout", "streamer")})
            if arguments.get("assistant_model") is not None:
                return self._generate_here(module, original, arguments, options)
            dispatcher = self.dispatchers[place]
            try:
                if not path and self.shared:
                    sequence = self._generate_together(self.shared[place], dispatcher, model, arguments, options)
                    if sequence is not None:
                        return sequence
                return self._generate_alone(dispatcher, model, module, path, arguments, options)
            except NotPortableError as error:
                what = "generate runs its loop in this process, a request per token, which is slower"
                self._say_once(what, str(error))
                return self._generate_here(module, original, arguments, options)

    def _generate_together(
        self, shared: SharedCalls, dispatcher: Dispatcher, model: Any, arguments: dict[str, Any], options: CallOptions
    ) -> torch.Tensor | None:
        """Decode a call together with others. Returns None if it has to run alone."""
        busy = dispatcher.replica.group.busy
        if not self._may_share(shared, busy):
            return None
        # Concurrent calls need their own seed: they have no place in the order of the caller's generator.
        draw_seed = self._stream.draw_seed if shared.busy or busy else None
        sequence = shared.generate(model, arguments, options.seed, options.timeout, options.streamer, draw_seed)
        if isinstance(sequence, str):
            log.debug("generate runs alone: %s", sequence)
            return None
        self._tell_of_lost_notes(arguments)
        return sequence

    def _may_share(self, shared: SharedCalls, busy: bool) -> bool:
        """By default calls share a batch from when two first come at the same time: others need no proof."""
        if not shared.trial.is_due and not busy:
            return False
        return not (may_be_hooked(self.hooks) or has_own_loop() or torch.is_autocast_enabled("cpu"))

    def _generate_alone(
        self,
        dispatcher: Dispatcher,
        model: Any,
        module: Any,
        path: str,
        arguments: dict[str, Any],
        options: CallOptions,
    ) -> Any:
        steps = None if path else dispatcher.steps
        eager = arguments
        if dispatcher.replica.group.device == "cuda":
            check_compiler(module, arguments, self.deployment.plan.world_size)
            eager = eager_generation(module, arguments)
        static, reason = (eager, "") if steps is None else static_generation(module, arguments, steps)
        if steps is not None and (
            reason := "its modules have forward hooks" if self.hooks.paths and self.hooks.present() else reason
        ):
            self._say_once(steps.without, reason, logging.INFO if steps.by_default else logging.WARNING)
            static = eager
        not_captured = functools.partial(self._not_captured, dispatcher)
        captures = steps is not None and steps.captured and not reason
        try:
            with_steps = replace(options, not_captured=not_captured) if captures else options
            output = dispatcher.call(model, path, "generate", (), static, with_steps)
            self._tell_of_lost_notes(arguments)
            return output
        except torch.OutOfMemoryError as error:
            # What was streamed cannot be taken back.
            if not captures or not not_captured(str(error).partition("\n")[0]) or options.streamer is not None:
                raise
            return dispatcher.call(model, path, "generate", (), eager, options)

    def _tell_of_lost_notes(self, arguments: dict[str, Any]) -> None:
        """Say once that functions among the arguments of a `generate` have written to global variables of the ranks."""
        if arguments.keys().isdisjoint((*STATEFUL, "custom_generate")):
            return
        for root in (*stateful_arguments(arguments), arguments.get("custom_generate")):
            if root is not None and (names := globals_written_by(root)):
                self._say_once(
                    f"what {described(root)} writes to the global {', '.join(names)} stays on the workers",
                    "keep notes in a closure, or in an attribute of an object that is passed; these come back",
                )

    def _not_captured(self, dispatcher: Dispatcher, why: str) -> bool:
        """Handle steps that could not be captured. By default no more steps are captured then: returns True."""
        steps = dispatcher.steps
        if steps is None:
            return False
        self._say_once(steps.without, why)
        if steps.by_default:
            dispatcher.steps = None
            end = dispatcher.replica.deadline_of(None)
            dispatcher.replica.ready(end)[0].call("forget_steps", deadline=end)
        return steps.by_default

    def _generate_here(
        self, model: Any, original: Callable[..., Any], arguments: dict[str, Any], options: CallOptions
    ) -> Any:
        if options.streamer is not None:
            arguments = {**arguments, "streamer": options.streamer}
        # The time is that of the whole loop, not of each of its requests.
        limit = deadline(checked_seconds(options.timeout, "timeout")) if options.timeout else contextlib.nullcontext()
        if options.seed is None and not self._stream.is_own:
            with limit, own_loop():
                return original(model, **arguments)
        with limit, self._stream.of_call(options.seed) as (before, store):
            with own_loop(), torch.random.fork_rng(devices=[]):
                torch.set_rng_state(before)
                output = original(model, **arguments)
                after = torch.get_rng_state()
            store(after)
        return output

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
        with self.with_adapters():
            if not has_own_loop():
                try:
                    return call()
                except NotPortableError as error:
                    self._say_once(f"{name} runs in this process, a request per token, which is slower", str(error))
            return original(module, *args, **kwargs)

    def with_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Within it this thread's calls run with the adapters that are active now."""
        return contextlib.nullcontext() if self.adapters is None else self.adapters.of_call()

    @contextlib.contextmanager
    def _turn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        """Choose the replica of a call: the one with its caches, or else the one with the least to do."""
        if len(self.dispatchers) == 1:
            yield 0
            return
        place = self._place_of_caches((args, kwargs))
        with self._lock:
            if place is None:
                place = min(range(len(self.dispatchers)), key=self._waiting)
            self._in_flight[place] += 1
        try:
            yield place
        finally:
            with self._lock:
                self._in_flight[place] -= 1

    def _waiting(self, place: int) -> tuple[bool, int]:
        """Sorts replicas: those that run first, then by their calls in flight."""
        return not self.dispatchers[place].replica.group.alive, self._in_flight[place]

    def _place_of_caches(self, arguments: Any) -> int | None:
        """Return the replica that holds the caches of a call, None for a call without caches.

        Raises:
            ParallelError: they are with several.
            StaleCacheError: one was held by workers that are gone.
        """
        places = set[int]()

        def note(cache: Any) -> Any:
            if isinstance(cache, CacheHandle):
                holder = cache.check()
                places.update(place for place, each in enumerate(self.dispatchers) if each.replica.caches is holder)
            return cache

        map_caches(arguments, note)
        if len(places) > 1:
            raise ParallelError("the caches of this call are with several replicas; use those of one conversation")
        return next(iter(places), None)

    def _say_once(self, what: str, why: str, level: int = logging.WARNING) -> None:
        if (what, level) not in self._said:
            self._said.add((what, level))
            log.log(level, "%s: %s", what, why)
