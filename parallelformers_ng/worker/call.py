"""Defines the messages between a parallelized model and its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from parallelformers_ng.generation.object_state import Changes, Given
from parallelformers_ng.live_code.packing import CodeChanges
from parallelformers_ng.runtime.request import described
from parallelformers_ng.sharding.active_adapters import ActiveAdapters
from parallelformers_ng.worker.changed_state import StateReport


@dataclass
class Call:
    """One method call on every rank.

    Attributes:
        path: dotted path of the module, "" for the model itself.
        args, kwargs: arguments of the method, caches as `Handle("cache", …)`.
        attributes: attributes set since the last call: (path of the module, name) → value, or REMOVED.
        unsure: whether the ranks must compare their results, because the plan cannot show that a result is complete.
        rng: state of the caller's CPU generator, in bytes, because tensors of a call are sent to devices.
        autocast: data type of the caller's `torch.autocast` for the ranks' kind of device; None outside autocast.
        configs: attributes of configurations that changed since the last call: dotted name → value, or REMOVED.
        environment: environment variables that the caller changed since the last call; None for a deleted one.
        cache_block: number of this call's block of cache numbers; the first new cache has the next number.
        freed_caches: numbers of caches and of blocks to free; see `CacheTable.free`.
        streams: whether each token is sent to the caller when it is chosen.
        hooks: the caller's forward hooks, `hooks.pickling.PackedHooks`.
        captured: whether decode steps of this `generate` over a static cache become CUDA graphs.
        confirmed: number of the last report of changed state that the caller has applied.
        grad: the caller's grad mode, if code of the program can see it; None for inference mode.
        draws: states of the generators of `random` and NumPy, if code draws from them.
    """

    # First, because these modules are imported before functions of the modules are read, and get the modules' globals.
    followed: Given | None = field(default=None, kw_only=True)
    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    unsure: bool = False
    rng: bytes = b""
    autocast: torch.dtype | None = None
    configs: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    cache_block: int = 0
    freed_caches: list[int] = field(default_factory=list)
    streams: bool = False
    has_caches: bool = False
    captured: bool = False
    hooks: Any = None
    adapters: ActiveAdapters | None = None
    code: CodeChanges | None = None
    confirmed: int = 0
    grad: bool | None = None
    draws: Any = None

    def __str__(self) -> str:
        return described(f"{self.path}.{self.method}".lstrip("."), self.args, self.kwargs)


@dataclass
class Assistance:
    """Stands in a call for the argument `assistant_model`: the assistant that the ranks have."""

    settings: GenerationConfig


@dataclass
class Answer:
    """The answer of rank 0.

    Attributes:
        rng: state of the generator after the call; None if the state did not change.
        caches: new facts about the caches in the arguments: number of the cache → `CacheInfo`.
        states: changes of the objects in the arguments.
        written: index of an argument that is a tensor → the tensor, if the method has written to it.
        hook_changes: changes by forward hooks, `hooks.pickling.HookChanges`.
        uncaptured: why decode steps did not become CUDA graphs; "" if the steps did, or should not.
        assistant_settings: settings of the assistant that `generate` has changed, by name.
        changes: changes of the model that the caller has not confirmed.
        draws: states of the generators after the call, as in `Call`; None if they did not change.
    """

    output: Any
    rng: torch.Tensor | None = None
    caches: dict[int, Any] = field(default_factory=dict)
    states: Changes | None = None
    written: dict[int, torch.Tensor] = field(default_factory=dict)
    uncaptured: str = ""
    hook_changes: Any = None
    assistant_settings: dict[str, Any] = field(default_factory=dict)
    changes: StateReport | None = None
    draws: Any = None
