"""Where the calls of a parallelized model go: to the replica with the least to do, or the one that has their caches."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from parallelformers_ng.batching.proof import Trial
from parallelformers_ng.cuda_graphs.modes import StaticSteps
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.cache_handle import CacheHandle
from parallelformers_ng.generation.caches import map_caches
from parallelformers_ng.hooks.registry import HookRegistry
from parallelformers_ng.model.adapters import Adapters
from parallelformers_ng.model.deployment import Deployment
from parallelformers_ng.model.dispatch import CallOptions, Dispatcher
from parallelformers_ng.model.random_stream import RandomStream
from parallelformers_ng.model.shared_calls import SharedCalls
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.sharding.tensors import is_within


class Calls:
    """Carries the calls of one model.

    Args:
        model: the parallelized model.
        deployment: its workers and weights.
        seed: seeds a stream of its own for the model; None follows the caller's generator.
        steps: how the decode steps are compiled or captured, None where they are not.
        batching: how many calls of `generate` each replica decodes together, None where each call runs alone.
        prove_at_once: see `Trial`.

    Attributes:
        hooks: the caller's.
        adapters: the model's, None where it has none.
        dispatchers: one for each replica.
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
        stream = RandomStream(seed)
        shared = None if batching is None else functools.partial(SharedCalls, batching, Trial(prove_at_once))
        self.dispatchers = [
            Dispatcher(model, replica, deployment.plan, stream, self.hooks, self.adapters, steps, shared)
            for replica in deployment.replicas
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
        self, model: Any, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], how: CallOptions
    ) -> Any:
        """As `Dispatcher.call`."""
        with self.with_adapters(), self._turn(args, kwargs) as dispatcher:
            return dispatcher.call(model, path, method, args, kwargs, how)

    def generate(
        self, model: Any, path: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `Dispatcher.generate`."""
        with self.with_adapters(), self._turn(args, kwargs) as dispatcher:
            return dispatcher.generate(model, path, original, args, kwargs)

    def generating(
        self, module: Any, name: str, original: Callable[..., Any], call: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        """As `Dispatcher.generating`."""
        with self.with_adapters():
            return self.dispatchers[0].generating(module, name, original, call, args, kwargs)

    def with_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Within it this thread's calls run with the adapters that are active now."""
        return contextlib.nullcontext() if self.adapters is None else self.adapters.of_call()

    @contextlib.contextmanager
    def _turn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Dispatcher]:
        """The dispatcher that a call goes through, which counts as busy with it meanwhile."""
        if len(self.dispatchers) == 1:
            yield self.dispatchers[0]
            return
        place = self._place_of_caches((args, kwargs))
        with self._lock:
            if place is None:
                place = min(range(len(self.dispatchers)), key=self._waiting)
            self._in_flight[place] += 1
        try:
            yield self.dispatchers[place]
        finally:
            with self._lock:
                self._in_flight[place] -= 1

    def _waiting(self, place: int) -> tuple[bool, int]:
        """Sorts replicas: those that run first, then by their calls in flight."""
        return not self.dispatchers[place].replica.group.ready, self._in_flight[place]

    def _place_of_caches(self, arguments: Any) -> int | None:
        """Which replica has the caches that a call takes, None where it takes none.

        Raises:
            ParallelError: they are with several.
            StaleCacheError: one was held by workers that are gone.
        """
        found = set[int]()

        def note(cache: Any) -> Any:
            if isinstance(cache, CacheHandle):
                holder = cache.check().workers
                found.update(place for place, each in enumerate(self.dispatchers) if each.replica is holder)
            return cache

        map_caches(arguments, note)
        if len(found) > 1:
            raise ParallelError("the caches of this call are with several replicas; use those of one conversation")
        return next(iter(found), None)
