"""Keeps the state that a call sends besides its arguments: the random state, the active adapters, and changes of
configurations, module attributes and environment variables that the workers do not have yet."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import itertools
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from parallelformers_ng.live_code.state import State
from parallelformers_ng.model.live_code import LiveCode
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.limits import set_within
from parallelformers_ng.sharding.active_adapters import ActiveAdapters, layers_with_adapters
from parallelformers_ng.sharding.attributes import (
    CONFIGURATIONS,
    REMOVED,
    are_equal,
    owners_of_configurations,
    parts_of,
)
from parallelformers_ng.worker.call import Call

_generators = threading.Lock()
"""Lock for reading and setting states of generators.

torch reads a state under a lock of the generator, and then makes a Python object, which may start the garbage
collector. The collector may give another thread a turn. If that thread read a state meanwhile, it would wait for the
generator's lock without releasing the interpreter, and both threads would wait forever (`THPGenerator_getState` in
https://github.com/pytorch/pytorch/blob/main/torch/csrc/Generator.cpp). A wait for this lock releases the interpreter.
"""


def state_of(generator: torch.Generator) -> torch.Tensor:
    """Return the state, uint8 `[bytes]` on CPU, of a generator that other threads may use at the same time."""
    with _generators:
        return generator.get_state()


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the state of a generator that other threads may use at the same time."""
    with _generators:
        generator.set_state(state)


class RandomStream:
    """The random stream of calls that have no `seed=`.

    Args:
        seed: seed of the model's own stream; with None, calls use torch's default CPU generator in this process.

    Attributes:
        is_own: whether the model has a stream of its own.
    """

    def __init__(self, seed: int | None) -> None:
        self.is_own = seed is not None
        self._stream = torch.default_generator if seed is None else torch.Generator().manual_seed(seed)
        self._follower = threading.RLock()  # held by the one call that may advance the stream
        self._draws = itertools.count()

    @contextlib.contextmanager
    def of_call(self, seed: int | None) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], object]]]:
        """Yield the random state at the start of a call, and the function that stores the state after the call.

        A state is a uint8 tensor `[bytes]` on CPU, the same as from `torch.get_rng_state`.
        """
        if seed is None and not self._follower.acquire(blocking=False):
            seed = self.draw_seed()  # two concurrent calls must not start from the same state of the stream
        if seed is not None:
            yield torch.Generator().manual_seed(seed).get_state(), lambda after: None
            return
        try:
            yield state_of(self._stream), functools.partial(set_state, self._stream)
        finally:
            self._follower.release()

    def draw_seed(self) -> int:
        """Return a new 64-bit seed for a concurrent call, without advancing the stream."""
        state = state_of(self._stream)
        return zlib.crc32(state.numpy()) << 32 | next(self._draws)


_adapters = contextvars.ContextVar[tuple[object, ActiveAdapters] | None]("adapters", default=None)


class Adapters:
    """The adapters (LoRA or IA3) of one model.

    Attributes:
        switching: lock for switching adapters and for reading which adapters are active.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.switching = threading.RLock()
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> Adapters | None:
        layers = layers_with_adapters(model)
        return cls(layers) if layers else None

    def active(self) -> ActiveAdapters:
        """Return the adapters of this thread's current call, or the active adapters outside of a call."""
        of_call = _adapters.get()
        if of_call is not None and of_call[0] is self:
            return of_call[1]
        with self.switching:
            return ActiveAdapters.of(self._layers)

    def of_call(self, active: ActiveAdapters | None = None) -> contextlib.AbstractContextManager[None]:
        """Keep this thread's adapters fixed inside the `with` block, even if other threads switch adapters."""
        return set_within(_adapters, (self, active or self.active()))


class Snapshot:
    """A copy of the attributes of configurations, including configurations that are nested in them.

    Args:
        configs: dotted name → configuration: any object with attributes, or None.
    """

    def __init__(self, configs: dict[str, Any]) -> None:
        self._roots = list(configs.items())
        self._parts = [
            (prefix, part, {name: _copied(value) for name, value in vars(part).items()})
            for root, config in configs.items()
            for prefix, part in parts_of(config, f"{root}.")
        ]
        states = {name: State(value) for name, value in self.values().items() if not isinstance(value, _CONTAINERS)}
        self._states = {name: state for name, state in states.items() if state}

    def still_holds(self, configs: dict[str, Any]) -> bool:
        """Whether `configs` has the same objects with unchanged attributes. The comparison takes microseconds, because
        comparing two dicts is fast for values that are identical objects."""
        if len(configs) != len(self._roots) or not all(configs.get(root) is config for root, config in self._roots):
            return False
        try:
            same = all(vars(part) == values for _, part, values in self._parts)
        except (RuntimeError, ValueError):  # `==` cannot compare dicts that contain tensors or arrays
            same = all(are_equal(vars(part), values) for _, part, values in self._parts)
        return same and not self.moved()

    def moved(self) -> set[str]:
        """Return the dotted names of attributes whose object was changed in place."""
        return {name for name, state in self._states.items() if not state.holds()}

    def with_value(self, name: str, value: Any) -> Snapshot:
        snapshot = copy.copy(self)
        snapshot._parts = [
            (prefix, part, {**values, name[len(prefix) :]: _copied(value)})
            if name.startswith(prefix) and "." not in name[len(prefix) :]
            else (prefix, part, values)
            for prefix, part, values in self._parts
        ]
        return snapshot

    def values(self) -> dict[str, Any]:
        inner = {id(part) for _, part, _ in self._parts}
        return {
            prefix + name: value
            for prefix, _, values in self._parts
            for name, value in values.items()
            if id(value) not in inner
        }


_VARIABLES: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
"""Environment variables of this process, encoded, because reading `os.environ` decodes each variable."""


class Edits:
    """Records the caller's changes of a model since `parallelize`, and which of them each group of workers has."""

    def __init__(self, model: nn.Module, code: LiveCode) -> None:
        self._model, self._code = weakref.ref(model), code
        self._owners = owners_of_configurations(model)
        self._built = Snapshot(self._configurations())  # restarted workers have these configurations
        # (module path, attribute) → number of the change, value, and the group that has set it; None if the user has
        # set it.
        self._attributes: dict[tuple[str, str], tuple[int, Any, WorkerGroup | Literal["nobody"] | None]] = {}
        self._taken: dict[tuple[str, str], tuple[Any, State]] = {}
        self._count = 0
        self._lock = threading.Lock()
        # What a group has received: configurations, numbers of changes of attributes and of code.
        self._of_new_workers = self._built, 0, 0
        self._known = weakref.WeakKeyDictionary[WorkerGroup, tuple[Snapshot, int, int]]()

    @property
    def model(self) -> Any:
        return self._model()

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """Record a new value of an attribute of the module at `path`, for the next call."""
        with self._lock:
            self._count += 1
            self._attributes[path, name] = self._count, value, None
            self._taken.pop((path, name), None)
        if name in CONFIGURATIONS and (path, name) not in self._owners:
            self._owners.append((path, name))

    def take_attribute(self, path: str, name: str, value: Any, group: WorkerGroup | None) -> None:
        """Record an attribute that a call on `group` has set, so that later calls send it to other groups."""
        with self._lock:
            self._count += 1
            self._attributes[path, name] = self._count, value, group or "nobody"
            own = vars(self.model.get_submodule(path)).get(name)
            self._taken[path, name] = own, State(own)

    def take_config(self, group: WorkerGroup, name: str, value: Any) -> None:
        """Record that a call on `group` has set a configuration attribute, so that the group need not receive it."""
        known = self._known.get(group, self._of_new_workers)
        self._known[group] = known[0].with_value(name, value), *known[1:]

    def code_count(self, only_step: bool = False) -> int:
        """Check the user's code for changes, and return how often it has changed since the model was parallelized."""
        if not (self._code.step.holds() and (only_step or self._code.rest.holds())):
            self._code.update()
        for key in [*self._code.moved]:
            if (value := self._code.moved.pop(key, REMOVED)) is not REMOVED and key not in self._taken:
                self.set_attribute(*key, value)
        for (path, name), (value, state) in [*self._taken.items()]:
            if not state.holds():  # the program has changed what a call has set
                self.set_attribute(path, name, value)
                self._taken[path, name] = value, State(value)
        return self._code.count

    def has_changes(self) -> bool:
        """Whether the model has changed since it was built, apart from its `generation_config`."""
        before, now = self._built.values(), Snapshot(self._configurations()).values()
        changed = {name for name in before.keys() | now.keys() if not are_equal(before.get(name), now.get(name))}
        changed |= self._built.moved()
        return bool(self.code_count() or self._attributes or any("generation_config" not in name for name in changed))

    def put_into(self, call: Call, group: WorkerGroup) -> Callable[[], None]:
        """Add to a call the changes that the workers do not have yet; return the function to call after the request has
        succeeded."""
        known_configs, time, code_count = self._known.get(group, self._of_new_workers)
        variables = group.environment
        if code_count != (codes := self.code_count(call.method == "__call__")):
            call.code = self._code.changes
        configs, count = self._configurations(), self._count
        if time == count and code_count == codes and variables == _VARIABLES and known_configs.still_holds(configs):
            return functools.partial(_note_environment, group, variables)
        current, variables_now = Snapshot(configs), {**_VARIABLES}
        call.environment = _environment_changes(variables, variables_now)
        before, now = known_configs.values(), current.values()
        with self._lock:
            newer = {key: (value, of) for key, (then, value, of) in self._attributes.items() if then > time}
        call.attributes = {key: value for key, (value, of) in newer.items() if of is not group}
        moved = known_configs.moved()
        call.configs = {
            name: value
            for name, value in now.items()
            if name not in before or name in moved or not are_equal(before[name], value)
        } | dict.fromkeys(before.keys() - now.keys(), REMOVED)
        # Check only attributes that the user has set: calls of the model may set any attribute.
        attributes = {key: value for key, (value, of) in newer.items() if of is None}
        if attributes or call.configs:
            self._code.take_settings(self._model(), attributes, call.configs)
            if code_count != (codes := self._code.count):
                call.code = self._code.changes

        def arrived() -> None:
            self._known[group] = current, count, codes
            _note_environment(group, variables_now)

        return arrived

    def _configurations(self) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: getattr(self.model.get_submodule(path) if path else self.model, name)
            for path, name in self._owners
        }


def send_environment(group: WorkerGroup) -> None:
    """Set this process's environment variables on the ranks of a group, which may have started long before."""
    now = {**_VARIABLES}
    if changes := _environment_changes(group.environment, now):
        group.call("set_environment", changes)
        group.environment = now


def _environment_changes(before: dict[Any, Any], now: dict[Any, Any]) -> dict[str, str | None]:
    """Return the decoded variables that differ; None for a variable that was removed."""
    return {
        os.fsdecode(name): None if (value := now.get(name)) is None else os.fsdecode(value)
        for name in before.keys() | now.keys()
        if now.get(name) != before.get(name)
    }


def _note_environment(group: WorkerGroup, sent: dict[Any, Any]) -> None:
    """Record the environment that ranks have after a call. They may have what other threads changed during the call, or
    not, so the next call sends it again."""
    if sent != _VARIABLES:
        sent = sent | {name: ... for name, _ in sent.items() ^ {**_VARIABLES}.items()}
    group.environment = sent


_CONTAINERS = (list, dict, set)


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value
