"""Carries out the calls of a parallelized model: chooses the replica, and decides whether a `generate` runs alone,
shares a batch, or runs its loop in this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from parallelformers_ng.batching.batch_proof import Trial
from parallelformers_ng.cuda_graphs.modes import check_compiler, eager_generation, static_generation
from parallelformers_ng.errors import NotPortableError, ParallelError
from parallelformers_ng.generation.cache_handle import CacheHandle
from parallelformers_ng.generation.caches import map_caches
from parallelformers_ng.generation.call_arguments import stateful_arguments
from parallelformers_ng.generation.written_globals import globals_written_by
from parallelformers_ng.live_code.self_changes import changes_itself
from parallelformers_ng.live_code.watch import refuse_modes
from parallelformers_ng.model.caller_state import set_state, state_of
from parallelformers_ng.model.deployment import Deployment, Replica
from parallelformers_ng.model.dispatcher import CallOptions, Dispatcher, may_be_hooked
from parallelformers_ng.model.marks import has_own_loop, own_loop
from parallelformers_ng.model.methods import OPTIONS, is_streamer, options_of_class
from parallelformers_ng.model.outside import OutsideWeights
from parallelformers_ng.model.seen_modes import words_reached
from parallelformers_ng.model.shared_calls import SharedCalls
from parallelformers_ng.option_checks import checked_seconds
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.runtime.limits import deadline
from parallelformers_ng.sharding.tensors import dotted, is_within

log = logging.getLogger("parallelformers_ng")


class Calls(Dispatcher):
    """Carries out the calls of one parallelized model.

    Attributes:
        shared: replica → the calls that it decodes as one batch; empty if each call runs alone.
        outside: weights in attributes of modules that are not registered as parameters or buffers.
    """

    def __init__(
        self, model: Any, deployment: Deployment, seed: int | None, batching: BatchingOptions | None, at_once: bool
    ) -> None:
        super().__init__(model, deployment, seed)
        self.outside = OutsideWeights(model, deployment.code.check.edits.objects())
        self.shared: dict[Replica, SharedCalls] = {}
        self._changes_itself = changes_itself(model)
        self._said: set[tuple[str, int]] = set()
        self._one_at_a_time = threading.RLock()
        self._lock = threading.Lock()
        trial = Trial(at_once, deployment.code.check.edits)
        if batching is not None:
            for replica in deployment.replicas:
                needs_graphs = not at_once and replica.current[0].device == "cuda"
                self.shared[replica] = SharedCalls(batching, trial, self, replica, needs_graphs)

    def names(self, name: str) -> bool:
        """Whether the user's code in the model or in a hook contains `name` as a name or as a string."""
        return name in self.deployment.code.words or name in self.hooks.words()

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """Have the workers set an attribute of a module before the next call, or delete it if `value` is REMOVED."""
        for layer in self.deployment.plan.layers:
            if layer.path == path and any(is_within(each, name) for each in layer.attributes[0]):
                raise ParallelError(
                    f"{path}.{name} is cut: each worker has a different value; set it before parallelize, or call"
                    " deparallelize() first"
                )
        self.deployment.state.accept(dotted(path, name))
        self.outside.put(path, name, value)
        self.modes.add(words_reached([value]))
        self.edits.set_attribute(path, name, value)

    def call(self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        """Run a method on the workers of one replica."""
        self._check_state_of_caller()
        with self.with_adapters(), self._turn(args, kwargs) as replica:
            return self.dispatch(replica, path, method, args, kwargs, options)

    def generate(
        self, model: Any, module: Any, path: str, original: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Run `generate` on the workers. If an argument cannot be sent, run the loop here with one request per token.

        Each reason why an argument cannot be sent is logged once, as a warning. An `assistant_model` is sent to the
        workers, which keep it for the next calls.
        """
        self._check_state_of_caller()
        with self.with_adapters(), self._turn((), arguments) as replica:
            own = options_of_class(original)
            own = own - {"streamer"} if own and is_streamer(arguments.get("streamer")) else own
            options = CallOptions(**{name: arguments.pop(name, None) for name in OPTIONS if name not in own})
            try:
                if (assistant := arguments.get("assistant_model")) is not None:
                    show, assistants = self.deployment.show_progress, replica.assistants
                    with (
                        self._limit(options),
                        assistants.turn(replica.ready(), assistant, arguments, show) as assistance,
                    ):
                        arguments_there = {**arguments, "assistant_model": assistance}
                        return self._generate_alone(replica, module, path, arguments_there, options)
                if not path and self.shared:
                    sequence = self._generate_together(replica, model, arguments, options)
                    if sequence is not None:
                        return sequence
                return self._generate_alone(replica, module, path, arguments, options)
            except NotPortableError as error:
                what = "generate runs its loop in this process, a request per token, which is slower"
                self.say_once(what, str(error))
                with self._limit(options):
                    return self._generate_here(module, original, arguments, options)

    def _generate_together(
        self, replica: Replica, model: Any, arguments: dict[str, Any], options: CallOptions
    ) -> torch.Tensor | None:
        if self._changes_itself or model.training:
            return None  # a batch runs different forward passes, so the model would change differently
        shared, busy = self.shared[replica], replica.current[0].busy
        if not shared.trial.is_due and not busy:  # by default, batching starts when two calls first run together
            return None
        roots = [*stateful_arguments(arguments)]
        if may_be_hooked(self.hooks) or has_own_loop() or torch.is_autocast_enabled("cpu"):
            return None
        if any(self.modes.are_seen(roots)) or any(globals_written_by(root) for root in roots if root is not None):
            return None
        # Each concurrent call needs its own seed: concurrent calls draw from one generator in no fixed order.
        draw_seed = self.stream.draw_seed if shared.batch.busy or busy else None
        sequence = shared.generate(model, arguments, options, draw_seed)
        if isinstance(sequence, str):
            log.debug("generate runs alone: %s", sequence)
            return None
        return sequence

    def _generate_alone(
        self, replica: Replica, module: Any, path: str, arguments: dict[str, Any], options: CallOptions
    ) -> Any:
        steps = None if path or self._changes_itself else replica.steps
        eager = arguments
        if replica.current[0].device == "cuda":
            check_compiler(module, arguments, self.deployment.plan.world_size)
            eager = eager_generation(module, arguments)
        static, reason = (eager, "") if steps is None else static_generation(module, arguments, steps)
        if steps is not None and (
            reason := "its modules have forward hooks" if self.hooks.paths and self.hooks.present() else reason
        ):
            self.say_once(steps.without, reason, logging.INFO if steps.by_default else logging.WARNING)
            static = eager
        if steps is None or reason or not steps.captured:
            return self.dispatch(replica, path, "generate", (), static, options)
        not_captured = functools.partial(self._not_captured, replica)
        try:
            with_steps = replace(options, not_captured=not_captured)
            return self.dispatch(replica, path, "generate", (), static, with_steps)
        except torch.OutOfMemoryError as error:
            # Tokens that were streamed cannot be taken back, so a call with a streamer is not repeated.
            if not not_captured(str(error).partition("\n")[0]) or options.streamer is not None:
                raise
            return self.dispatch(replica, path, "generate", (), eager, options)

    def _not_captured(self, replica: Replica, why: str) -> bool:
        """Log that decode steps could not be captured as CUDA graphs; return whether later calls no longer capture."""
        steps = replica.steps
        if steps is None:
            return False
        self.say_once(steps.without, why)
        if steps.by_default:
            replica.steps = None
            group, _, end = replica.ready()
            group.call("rank_state.forget_steps", deadline=end)
        return steps.by_default

    def _generate_here(
        self, model: Any, original: Callable[..., Any], arguments: dict[str, Any], options: CallOptions
    ) -> Any:
        if options.streamer is not None:
            arguments = {**arguments, "streamer": options.streamer}
        if options.seed is None and not self.stream.is_own:
            with own_loop():
                return original(model, **arguments)
        with self.stream.of_call(options.seed) as (before, store):
            kept = state_of(torch.default_generator)
            set_state(torch.default_generator, before)
            try:
                with own_loop():
                    output = original(model, **arguments)
                store(state_of(torch.default_generator))
            finally:
                set_state(torch.default_generator, kept)
        return output

    @staticmethod
    def _limit(options: CallOptions) -> contextlib.AbstractContextManager[None]:
        """Return a context that limits all requests of a call together to the call's timeout."""
        return deadline(checked_seconds(options.timeout, "timeout")) if options.timeout else contextlib.nullcontext()

    def _check_state_of_caller(self) -> None:
        """Raise ParallelError for an active torch mode, or a changed weight, that ranks cannot reproduce. Send other
        changed weights to the ranks."""
        refuse_modes()
        for path, name, value in self.outside.changed() if self.outside.known or self.outside.shared else ():
            self.set_attribute(path, name, value)

    def with_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread's calls use the adapters that were active at its start."""
        return contextlib.nullcontext() if self.adapters is None else self.adapters.of_call()

    @contextlib.contextmanager
    def _turn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Replica]:
        """Yield the replica for a call: the one with the caches in its arguments, or the one with the fewest calls."""
        replicas = self.deployment.replicas
        if len(replicas) == 1:
            yield replicas[0]
            return
        holders = set[Replica]()

        def note(cache: Any) -> Any:
            if isinstance(cache, CacheHandle):
                registry = cache.check()
                holders.update(replica for replica in replicas if replica.caches is registry)
            return cache

        map_caches((args, kwargs), note)
        if len(holders) > 1:
            raise ParallelError("the caches of this call are on several replicas; pass the caches of one conversation")
        with self._lock:
            # Running replicas come first, then replicas with fewer calls.
            chosen = min(holders or replicas, key=lambda replica: (not replica.group.alive, replica.in_flight))
            chosen.in_flight += 1
        is_changing = self._changes_itself or self.edits.model.training
        try:
            # Calls that change the model run one after another, because each must start with the changes of the
            # previous call.
            with self._one_at_a_time if is_changing else contextlib.nullcontext():
                yield chosen
        finally:
            with self._lock:
                chosen.in_flight -= 1

    def say_once(self, what: str, why: str, level: int = logging.WARNING) -> None:
        if (what, level) not in self._said:
            self._said.add((what, level))
            log.log(level, "%s: %s", what, why)
