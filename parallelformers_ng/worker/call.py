"""Defines the messages between a parallelized model and its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from parallelformers_ng.generation.object_messages import Changes, Given
from parallelformers_ng.live_code.packing import CodeChanges
from parallelformers_ng.runtime.request import described
from parallelformers_ng.sharding.active_adapters import ActiveAdapters
from parallelformers_ng.worker.changed_state import StateReport


@dataclass
class Call:
    """One method call on every rank.

    Attributes:
        path: dotted path of the module, "" for the model itself.
        args, kwargs: arguments of the method, with `Handle("cache", …)` for each cache.
        attributes: attributes set since the last call: (path of the module, name) → value, or REMOVED.
        unsure: whether the ranks must compare their results, because the plan does not tell if results are whole.
        rng: state of the caller's CPU generator, in bytes, because tensors of a call are sent to devices.
        autocast: data type of the caller's `torch.autocast` for the ranks' kind of device; None outside autocast.
        configs: attributes of configurations that changed since the last call: dotted name → value, or REMOVED.
        environment: environment variables that the caller changed since the last call; None for a deleted one.
        cache_block: first number of this call's block of numbers for new caches.
        freed_caches: numbers of caches, or of blocks of caches, to free; see `CacheTable.free`.
        streams: whether each token is sent to the caller when it is chosen.
        hooks: the caller's forward hooks, `hooks.pickling.PackedHooks`.
        captured: whether decode steps of this `generate` over a static cache become CUDA graphs.
        confirmed: number of the last report of changed state that the caller has applied.
        grad: the caller's grad mode, if the user's code may read it; None for inference mode.
        draws: states of the generators of `random` and NumPy, if code draws from them.
    """

    # The first field, so that it is unpickled first: it imports the modules whose functions later fields contain.
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
    """Replaces the argument `assistant_model` in a call. The ranks have the assistant already."""

    settings: GenerationConfig


@dataclass
class Answer:
    """The result of a call on rank 0, with the changes that the caller must apply.

    Attributes:
        rng: state of the CPU generator after the call; None if it did not change.
        caches: number of each cache in the arguments → its new `CacheInfo`.
        states: changes that the call made to objects in the arguments.
        written: tensors in the arguments to which the method has written, by index among the tensor arguments.
        hook_changes: changes by forward hooks, `hooks.pickling.HookChanges`.
        uncaptured: why no CUDA graphs were captured; "" if they were captured, or not wanted.
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
