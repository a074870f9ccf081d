"""From a method call on the parallelized model to a `Call` for the replicas, and from their `Answer` back."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from parallelformers_ng.call import Answer, Call
from parallelformers_ng.compiling import StaticSteps, static_generation
from parallelformers_ng.deployment import Deployment
from parallelformers_ng.edits import CONFIGURATIONS, AttributeWatch, EditWatch, owners_of_configurations
from parallelformers_ng.errors import NotPortableError, ParallelError, WorkerError
from parallelformers_ng.generation.caches import map_caches, map_handles
from parallelformers_ng.generation.handle import CacheHandle, adopt, is_empty
from parallelformers_ng.generation.state import Watch, watched_arguments
from parallelformers_ng.generation.streaming import deliver_to
from parallelformers_ng.hooks.registered import Outgoing, Registered
from parallelformers_ng.runtime.deadline import checked_seconds, deadline
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.interrupts import Held
from parallelformers_ng.runtime.leaves import Handle

log = logging.getLogger("parallelformers_ng")


class _Thread(threading.local):
    """What a thread is doing with a model."""

    generates_here = False

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Within it, `generate` runs its loop in this process."""
        before, self.generates_here = self.generates_here, True
        try:
            yield
        finally:
            self.generates_here = before


class Dispatcher:
    """Turns calls into requests for one model.

    Args:
        model: the parallelized model.
        deployment: its workers.
        seed: seeds a stream of its own for the model; None follows the caller's generator.
        steps: how the decode steps are compiled or captured, None where they are not.
    """

    def __init__(
        self, model: Any, deployment: Deployment, seed: int | None = None, steps: StaticSteps | None = None
    ) -> None:
        self.deployment = deployment
        self._owners = owners_of_configurations(model)
        self._configs = EditWatch(self._configurations(model))
        self._stream = None if seed is None else torch.Generator().manual_seed(seed)
        self._stream_lock = threading.Lock()
        self._steps = steps
        self.hooks = Registered(model, deployment.plan)
        self._said: set[str] = set()
        self._thread = _Thread()
        self._attributes = AttributeWatch()

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """Have the replicas set an attribute of a module before the next call.

        Raises:
            ParallelError: the ranks have values of their own for it.
        """
        for layer in self.deployment.plan.layers:
            if layer.path == path and any(f"{each}.".startswith(f"{name}.") for each in layer.attributes[0]):
                raise ParallelError(
                    f"{path}.{name} is cut, each worker has its own; set it before parallelize, or deparallelize()"
                    " first"
                )
        self._attributes.note(path, name, value)
        if name in CONFIGURATIONS and (path, name) not in self._owners:
            self._owners.append((path, name))

    def _configurations(self, model: nn.Module) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: getattr(model.get_submodule(path) if path else model, name)
            for path, name in self._owners
        }

    def call(
        self, model: Any, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any
    ) -> Any:
        """Run a method on the replicas.

        Args:
            path: dotted path of the module, "" for the model.
            method: its method.
            how: `seed`, `timeout`, `streamer` of this call; `captured`, `unsure`, as in `Call`.

        Raises:
            NotPortableError: an argument cannot cross by value; nothing was run.
            GroupError: see its subclasses.
        """
        end = self._deadline(how.get("timeout"))
        with self.hooks.turn(end) if self.hooks else contextlib.nullcontext() as hooks:
            # The group comes first: what is sent below is right for this incarnation of the workers, and for no other.
            group, incarnation = self.deployment.ready(end)
            with Held():  # what is noted here, and what the workers have done, must not part
                return self._request(model, path, method, args, kwargs, how, end, hooks, group, incarnation)

    def _request(
        self,
        model: Any,
        path: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        how: dict[str, Any],
        end: float,
        hooks: Outgoing | None,
        group: WorkerGroup,
        incarnation: int,
    ) -> Any:
        caches: dict[int, Cache] = {}
        args, kwargs = map_caches((args, kwargs), lambda cache: self._send_cache(cache, caches))
        watch = Watch(watched_arguments(kwargs))
        if hooks is not None:
            hooks.check_apart_from(watch)
        rng, store_rng = self._random_stream(how.get("seed"))
        streamer = how.get("streamer")
        configs, configs_arrived = self._configs.changes(self._configurations(model), incarnation)
        attributes, attributes_arrived = self._attributes.changes(incarnation)
        call = Call(
            path,
            method,
            args,
            kwargs,
            rng=rng,
            autocast=torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            configs=configs,
            cache_block=self.deployment.new_cache_block(),
            freed_caches=self.deployment.take_freed(),
            streams=streamer is not None,
            watched=bool(watch.parts),
            captured=how.get("captured", False),
            attributes=attributes,
            unsure=how.get("unsure", False),
            hooks=None if hooks is None else hooks.sent,
        )
        on_event = None if streamer is None else deliver_to(streamer)
        try:
            answer: Answer = group.call("run", call, timeout=end - time.monotonic(), on_event=on_event)
            configs_arrived()
            attributes_arrived()
            store_rng(None if answer.rng is None else answer.rng.clone())  # see Randomness: torch wants its own storage
            watch.restore(answer.states)
            if hooks is not None:
                hooks.bring_home(answer.noted, lambda handle: self._receive_cache(handle, incarnation))
            if answer.uncaptured and self._steps is not None:
                self._say_once(self._steps.without, answer.uncaptured)
            for number, facts in answer.caches.items():
                self._refresh_cache(caches.get(number), incarnation, number, facts)
            return map_handles(answer.output, lambda handle: self._receive_cache(handle, incarnation))
        except BaseException as error:  # an interrupt may come as late as here
            if hooks is not None and isinstance(error, WorkerError):
                noted = group.call("noted", call.cache_block, timeout=end - time.monotonic())
                hooks.bring_home(noted, lambda handle: self._receive_cache(handle, incarnation))
            self.deployment.free_after_failure(incarnation, [*call.freed_caches, call.cache_block], caches)
            raise

    def generating(
        self, module: Any, name: str, original: Callable[..., Any], call: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        """A method of the modelling code that generates. It runs in this process where something cannot cross to the
        workers, and within a `generate` that does: it is given the same objects.

        Args:
            module: the model, or a model within it.
            name, original: the method, and its class's.
            call: runs it on the workers.
        """
        if not self._thread.generates_here:
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
        how: dict[str, Any] = {name: kwargs.pop(name) for name in ("seed", "timeout") if name in kwargs}
        bound = inspect.signature(original).bind_partial(module, *args)
        named = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
        merged = {**named, **kwargs}
        if merged.get("assistant_model") is not None:
            return self._generate_here(
                module, original, merged, how, "the assistant model stays in this process", quiet=True
            )
        streamer = merged.pop("streamer", None)
        sent = merged
        if not path and self._steps is not None:
            sent, reason = static_generation(module, merged, self._steps)
            if self.hooks:
                sent, reason = merged, "its modules have forward hooks"
            if reason:
                self._say_once(self._steps.without, reason)
            how["captured"] = self._steps.captured and not reason
        try:
            return self.call(model, path, "generate", (), sent, streamer=streamer, **how)
        except NotPortableError as error:
            if streamer is not None:
                merged["streamer"] = streamer
            return self._generate_here(module, original, merged, how, str(error))

    def _generate_here(
        self,
        model: Any,
        original: Callable[..., Any],
        kwargs: dict[str, Any],
        how: dict[str, Any],
        why: str,
        quiet: bool = False,
    ) -> Any:
        if not quiet:
            self._say_once("generate runs its loop in this process, a request per token, which is slower", why)
        # The time is that of the whole loop, not of each of its requests.
        limit = deadline(checked_seconds(how["timeout"], "timeout")) if how.get("timeout") else contextlib.nullcontext()
        if how.get("seed") is None and self._stream is None:
            with limit, self._thread.here():
                return original(model, **kwargs)
        rng, store = self._random_stream(how.get("seed"))
        with limit, self._thread.here(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(rng)
            output = original(model, **kwargs)
            after = torch.get_rng_state()
        store(after)
        return output

    def _say_once(self, what: str, why: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s: %s", what, why)

    def _deadline(self, timeout: float | None) -> float:
        return self.deployment.deadline_of(None if timeout is None else checked_seconds(timeout, "timeout"))

    def _random_stream(self, seed: int | None) -> tuple[torch.Tensor, Callable[[torch.Tensor | None], None]]:
        """(state to start from, what to do with the state afterwards)."""
        if seed is not None:
            return torch.Generator().manual_seed(seed).get_state(), lambda after: None
        if self._stream is not None:
            with self._stream_lock:
                return self._stream.get_state(), self._advance_stream
        return torch.get_rng_state(), lambda after: None if after is None else torch.set_rng_state(after)

    def _advance_stream(self, after: torch.Tensor | None) -> None:
        if after is not None and self._stream is not None:
            with self._stream_lock:
                self._stream.set_state(after)

    # -- caches ----------------------------------------------------------------------------------------------------

    def _send_cache(self, cache: Cache, sent: dict[int, Cache]) -> Handle:
        if isinstance(cache, CacheHandle):
            if cache._owner() is not self.deployment:
                raise ParallelError(f"this {type(cache).__name__} belongs to another model")
            whole, half = cache.place()
            sent[whole._number] = whole
            return Handle("cache", (whole._number, half))
        if not is_empty(cache):
            raise ParallelError(
                f"this {type(cache).__name__} was filled outside the parallelized model, whose workers hold their own"
                " heads; pass an empty cache, or one that this model returned"
            )
        number = self.deployment.next_cache_number()
        sent[number] = cache
        return Handle("new cache", (number, cache))

    def _refresh_cache(self, cache: Cache | None, incarnation: int, number: int, facts: Any) -> None:
        if isinstance(cache, CacheHandle):
            cache._facts = facts
        elif cache is not None:
            self.deployment.remember_cache(adopt(cache, self.deployment, incarnation, number, facts))

    def _receive_cache(self, handle: Handle, incarnation: int) -> Any:
        number, facts, half = handle.payload["id"], handle.payload["facts"], handle.payload["half"]
        known = self.deployment.known_cache(number)
        if known is not None:
            known._facts = facts or known._facts
            return getattr(known, half) if half else known
        made = adopt(None, self.deployment, incarnation, number, facts)
        self.deployment.remember_cache(made)
        return made
