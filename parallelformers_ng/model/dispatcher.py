"""Turns calls of a model into requests for one of its groups of workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers.cache_utils import Cache

from parallelformers_ng.errors import GroupError, NotPortableError, ParallelError, WorkerError
from parallelformers_ng.generation.caches import PLAIN, map_caches, map_handles
from parallelformers_ng.generation.call_arguments import roots_of, stateful_arguments, tensors_of
from parallelformers_ng.generation.object_messages import TAKEN
from parallelformers_ng.generation.object_parts import put_items
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.generation.streaming import deliver
from parallelformers_ng.hooks.registry import HookRegistry
from parallelformers_ng.model.caller_state import Adapters, Edits, RandomStream
from parallelformers_ng.model.deployment import Deployment, Replica
from parallelformers_ng.model.seen_modes import Modes
from parallelformers_ng.worker.call import Answer, Call
from parallelformers_ng.worker.caller_modes import set_draw_states


@dataclass(frozen=True)
class CallOptions:
    """Options of one call.

    Attributes:
        seed: 64-bit seed of the call's random numbers; None uses the stream of the model or the caller's generator.
        timeout: maximum duration of the call in seconds; None uses the group's timeout.
        streamer: streamer that receives each token when it is chosen; None for no streaming.
        priority: whole number; among the calls that wait for a row of the batch, a lower number goes first. None is 0.
        not_captured: function that receives the reason if decode steps cannot become CUDA graphs; with None, no decode
            step of the call is captured.
        unsure: whether the ranks must compare their results; see `Call`.
    """

    seed: int | None = None
    timeout: float | None = None
    streamer: Any = None
    priority: int | None = None
    not_captured: Callable[[str], object] | None = None
    unsure: bool = False

    def __post_init__(self) -> None:
        if type(self.priority) not in (int, type(None)):
            raise ParallelError(f"priority is {self.priority!r}; it takes a whole number, and lower numbers go first")


def may_be_hooked(hooks: HookRegistry) -> bool:
    """Whether the caller may have registered hooks, so that a call must collect them."""
    return bool((hooks.paths and hooks.present()) or torch_module._has_any_global_hook())


class Dispatcher:
    """Sends calls of one model to the workers, together with the caller's state on which each call depends.

    Attributes:
        hooks: forward hooks that the caller has registered on the model.
        adapters: adapters of the model; None if the model has no adapters.
        edits: changes of the model's attributes, configurations and code that workers do not have yet.
        stream: random stream of calls without a seed.
        modes: whether code in a call reads the caller's grad mode or random states.
    """

    def __init__(self, model: Any, deployment: Deployment, seed: int | None) -> None:
        self.deployment = deployment
        self.hooks = HookRegistry(model, deployment.plan)
        self.adapters = Adapters.of(model)
        self.edits = Edits(model, deployment.code)
        self.stream = RandomStream(seed)
        self.modes = Modes(deployment.code)

    def dispatch(
        self, replica: Replica, path: str, method: str, args: Any, kwargs: dict[str, Any], options: CallOptions
    ) -> Any:
        """Run a method on the workers; the result has tensors on CPU, and a `CacheHandle` instead of each cache.

        The call also changes state in this process: the random stream, caches, and objects of the caller such as logits
        processors and forward hooks.
        """
        end = replica.current[0].deadline(options.timeout)
        registry, caches = replica.caches, dict[int, Cache]()
        is_plain = all(isinstance(value, PLAIN) for value in (*args, *kwargs.values()))
        roots = [] if is_plain else roots_of(args, kwargs)
        state = ObjectState(roots) if roots else None
        # Calls whose objects may be shared run one after another: each call starts with the changes of the last call.
        alone = state is not None and bool(state.parts) and (method != "generate" or state.has_own_code)
        with (
            self.hooks.turn(end) if alone or may_be_hooked(self.hooks) else contextlib.nullcontext() as hooks,
            self.stream.of_call(options.seed) as stream,
        ):
            # Get the group first: the message below is valid only for this incarnation of the workers.
            group, incarnation = replica.current
            if not group.alive:
                group, incarnation, _ = replica.ready(end)
            receive = functools.partial(registry.receive, incarnation=incarnation)
            known = self.deployment.state
            live, tensors = alone and method != "forward", tensors_of(args, kwargs)
            if not is_plain:
                state = ObjectState(roots) if alone else state
                if hooks is not None and state is not None:
                    hooks.check_apart_from(state)
                args, kwargs = map_caches((args, kwargs), lambda cache: registry.send(cache, caches))
            call = Call(
                path,
                method,
                args,
                kwargs,
                unsure=options.unsure,
                rng=stream[0].numpy().tobytes(),
                autocast=torch.get_autocast_dtype(group.device) if torch.is_autocast_enabled(group.device) else None,
                cache_block=next(registry.blocks),
                streams=options.streamer is not None,
                has_caches=bool(caches),
                followed=state.followed(live) if state is not None and state.parts else None,
                captured=options.not_captured is not None and incarnation == replica.answered,
                hooks=None if hooks is None else hooks.packed,
                adapters=None if self.adapters is None else self.adapters.active(),
                confirmed=known.prepare(group) if known.is_changed else 0,
            )
            code = [] if hooks is None else [hook.call for hook in self.hooks.present()]
            code += [] if state is None else stateful_arguments(kwargs)
            if code or any(self.modes.seen):
                self.modes.put_into(call, code)
            arrived = self.edits.put_into(call, group)
            if registry.unwanted:
                call.freed_caches = registry.take_freed()
            on_event = None if options.streamer is None else functools.partial(deliver, options.streamer)
            watch = state.update if state is not None and live else None

            def on_live_event(event: Any) -> None:
                if event == TAKEN and state is not None:
                    state.confirm()
                elif on_event is not None:
                    on_event(event)

            listener = on_event if watch is None else on_live_event
            try:
                values = group.call_each(
                    "run", [(call,)], deadline=end, on_event=listener, to_devices=True, watch=watch
                )
                answer: Answer = values[0]
                replica.answered = max(replica.answered, incarnation)
                arrived()
                if answer.changes is not None or any(values[1:]):
                    self.deployment.state.take(self.edits, group, [answer.changes, *values[1:]], failed=False)
                if answer.rng is not None:
                    stream[1](answer.rng.clone())  # a generator's state must be a tensor with its own storage
                if answer.draws is not None:
                    set_draw_states(answer.draws)
                if state is not None:
                    state.restore(answer.states)
                for index, written in answer.written.items():
                    put_items(tensors[index], written)
                if hooks is not None:
                    hooks.apply_changes(answer.hook_changes, receive)
                if answer.uncaptured and options.not_captured is not None:
                    options.not_captured(answer.uncaptured)
                for name, value in answer.assistant_settings.items():
                    setattr(kwargs["assistant_model"].settings, name, value)
                for number, info in answer.caches.items():
                    registry.refresh(caches.get(number), incarnation, number, info)
                if type(answer.output) is torch.Tensor:
                    return answer.output
                return map_handles(answer.output, receive)
            except BaseException as error:  # Ctrl-C included, because the workers must free the caches of the call
                registry.free_after_failure(incarnation, [*call.freed_caches, call.cache_block], caches)
                if isinstance(error, WorkerError) and not isinstance(error, NotPortableError):
                    with contextlib.suppress(GroupError):
                        reports = group.call_each("state_changes", [()])
                        self.deployment.state.take(self.edits, group, reports, failed=True)
                    # Use the changes of the rank that raised the error, because all other ranks were interrupted.
                    try:
                        if call.followed is not None and state is not None:
                            state.restore(group.call_each("changes_of_failed", [(call.cache_block,)])[error.rank])
                        if hooks is not None:
                            changes = group.call_each("hooks.changes", [(call.cache_block,)])[error.rank]
                            hooks.apply_changes(changes, receive)
                    except GroupError as lost:
                        error.add_note(f"Values that the objects of this call recorded are lost: {lost}")
                raise
