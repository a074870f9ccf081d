"""State that goes with a call besides its arguments: the start of its random numbers, and the caller's changes of
configurations and modules that the workers do not know yet."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from parallelformers_ng.model.live_code import LiveCode
from parallelformers_ng.worker.call import Call

Stream = tuple[torch.Tensor, Callable[[torch.Tensor], object]]
"""The state of a random stream, and what takes its state afterwards."""


class RandomStream:
    """The random stream of calls without a seed of their own.

    Args:
        seed: begins a stream of the model's own; None: calls follow the caller's generator.
    """

    def __init__(self, seed: int | None) -> None:
        self._own = None if seed is None else torch.Generator().manual_seed(seed)
        self._follower = threading.RLock()  # of who draws from that stream, or from the caller's generator
        self._draws = itertools.count()

    @property
    def is_own(self) -> bool:
        """Whether the model has a stream of its own."""
        return self._own is not None

    @contextlib.contextmanager
    def of_call(self, seed: int | None) -> Iterator[Stream]:
        """The state that a call starts from, and what takes the state afterwards."""
        if seed is None and not self._follower.acquire(blocking=False):
            seed = self.draw_seed()  # from where the call began that follows the generator, this would draw the same
        if seed is not None:
            yield torch.Generator().manual_seed(seed).get_state(), lambda after: None
            return
        stream = self._own or torch.default_generator
        try:
            yield stream.get_state(), stream.set_state
        finally:
            self._follower.release()

    def draw_seed(self) -> int:
        """For a call beside others: each has its own, and the generator that they do not follow stays as it is."""
        state = (self._own or torch.default_generator).get_state()
        return zlib.crc32(state.numpy()) << 32 | next(self._draws)


class Snapshot:
    """The attributes of configurations, and of those within them, as they were.

    Args:
        configs: dotted name → any object whose state is its attributes, or None.
    """

    def __init__(self, configs: dict[str, Any]) -> None:
        self._roots = list(configs.items())
        self._parts = [
            (prefix, part, {name: _copied(value) for name, value in vars(part).items()})
            for root, config in configs.items()
            for prefix, part in _parts(config, f"{root}.")
        ]

    def still_holds(self, configs: dict[str, Any]) -> bool:
        """True where these are the same objects and nothing in them has changed. Costs microseconds: dicts compare the
        values that are the same objects by identity."""
        return (
            len(configs) == len(self._roots)
            and all(configs.get(root) is config for root, config in self._roots)
            and all(vars(part) == values for _, part, values in self._parts)
        )

    def values(self) -> dict[str, Any]:
        """Dotted name → value, of everything but the configurations within."""
        inner = {id(part) for _, part, _ in self._parts}
        return {
            prefix + name: value
            for prefix, _, values in self._parts
            for name, value in values.items()
            if id(value) not in inner
        }


class Edits:
    """The caller's changes since the model was parallelized, and the ones that the workers do not know yet.

    Args:
        model: the model, as the workers have it.
        code: the code that it runs in this process.
    """

    def __init__(self, model: nn.Module, code: LiveCode) -> None:
        self._code = code
        self._owners = owners_of_configurations(model)
        self._built = Snapshot(self._configurations(model))  # what every new incarnation of the workers begins with
        self._attributes: dict[tuple[str, str], tuple[int, Any]] = {}  # (path, name) → when it was set, value
        self._count = 0
        self._lock = threading.Lock()
        # What the workers of an incarnation know: configurations, and all attributes that were set up to a time.
        # Also how often code had changed.
        self._known = (0, self._built, 0, 0)

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """Note a new value of an attribute of the module at `path`."""
        with self._lock:
            self._count += 1
            self._attributes[path, name] = self._count, value
        if name in CONFIGURATIONS and (path, name) not in self._owners:
            self._owners.append((path, name))

    def code_count(self, only_step: bool = False) -> int:
        """Look for changes of the code; how often there were any.

        Args:
            only_step: look at the code of a forward pass alone.

        Raises:
            ParallelError, NotPortableError: see `LiveCode.update`.
        """
        if not (self._code.step.holds() and (only_step or self._code.rest.holds())):
            self._code.update()
        return self._code.count

    def put_into(self, call: Call, model: nn.Module, incarnation: int) -> Callable[[], None]:
        """Add to a call what the workers of this incarnation do not know yet.

        Returns:
            What is to be called once the workers have it. A request that fails on its way has taught them nothing.

        Raises:
            ParallelError: code was changed in a way that the workers cannot follow.
        """
        known_incarnation, known, time, code_count = self._known
        if known_incarnation != incarnation:
            known, time, code_count = self._built, 0, 0
        if code_count != (codes := self.code_count(call.method == "__call__")):
            call.code = self._code.changes
        configs, count = self._configurations(model), self._count
        if time == count and code_count == codes and known.still_holds(configs):
            return _nothing
        current = Snapshot(configs)
        before, now = known.values(), current.values()
        with self._lock:
            attributes = {key: value for key, (then, value) in self._attributes.items() if then > time}

        def arrived() -> None:
            self._known = incarnation, current, count, codes

        call.configs = {name: value for name, value in now.items() if name not in before or before[name] != value}
        call.attributes = attributes
        return arrived

    def _configurations(self, model: nn.Module) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: getattr(model.get_submodule(path) if path else model, name)
            for path, name in self._owners
        }


CONFIGURATIONS = ("config", "generation_config")
"""Attributes of modules that are configurations."""


def owners_of_configurations(model: nn.Module) -> list[tuple[str, str]]:
    """By which modules and attributes all configurations of a model are reached: the model's own first, then those that
    other modules have for themselves (T5's encoder a copy, a language model within another how it generates)."""
    seen: set[int] = set()
    owners = []
    for path, module in model.named_modules():
        for name in CONFIGURATIONS:
            config = vars(module).get(name)
            if (not path and hasattr(module, name)) or (hasattr(config, "to_dict") and id(config) not in seen):
                seen |= {id(part) for _, part in _parts(config, "")}
                owners.append((path, name))
    return owners


def _parts(config: Any, prefix: str) -> list[tuple[str, Any]]:
    """Return a configuration and those within it, each with the dotted name that leads to it."""
    if config is None:
        return []
    parts = [(prefix, config)]
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            parts += _parts(value, f"{prefix}{name}.")
    return parts


def _copied(value: Any) -> Any:
    """Return the value, or a copy where it could change in place."""
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def _nothing() -> None:
    """Do nothing: the workers know it all."""
