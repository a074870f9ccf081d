"""The messages between a parallelized model and its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.live_code.packing import CodeChanges
from parallelformers_ng.sharding.active_adapters import ActiveAdapters


@dataclass
class Call:
    """One method call on every rank.

    Attributes:
        path: dotted path of the module, "" for the model itself.
        method: the method's name.
        args, kwargs: its arguments, caches as `Handle("cache", …)`.
        attributes: attributes of modules that were set since the last call: (path of the module, name) → value.
        unsure: the plan cannot tell whether the method gives a whole result; the ranks compare theirs.
        rng: state of the caller's CPU generator, in bytes: tensors of a call are sent to devices.
        autocast: data type of the caller's `torch.autocast` for the kind of devices that the ranks have, None outside
            one.
        configs: attributes of configurations, also of how to generate, that changed since the last call: dotted name →
            value.
        cache_block: first id of the caches that this call makes.
        freed_caches: ids of caches whose handles are gone.
        streams: the caller waits for tokens as they are chosen.
        has_caches: there are caches among the arguments.
        returns_state: the arguments hold objects of the caller's whose state is wanted back.
        hooks: the caller's forward hooks, `hooks.pickling.PackedHooks`; None if there are none.
        captured: the decode steps of this `generate` over a static cache become CUDA graphs.
        adapters: adapters of the call; None if the model has none.
        code: code that the caller's program has changed since the last call; None if it has changed none.
    """

    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    unsure: bool = False
    rng: bytes | None = None
    autocast: torch.dtype | None = None
    configs: dict[str, Any] = field(default_factory=dict)
    cache_block: int = 0
    freed_caches: list[int] = field(default_factory=list)
    streams: bool = False
    has_caches: bool = False
    returns_state: bool = False
    captured: bool = False
    hooks: Any = None
    adapters: ActiveAdapters | None = None
    code: CodeChanges | None = None


@dataclass
class Answer:
    """The answer of rank 0.

    Attributes:
        output: return value of the method, caches as `Handle("cache", …)`.
        rng: the generator's state afterwards where it moved.
        caches: new facts about the caches that were passed in: id → `CacheInfo`.
        states: new states of such objects that changed, as `generation.object_state.ObjectState` numbers them.
        hook_changes: changes by forward hooks, `hooks.pickling.HookChanges`.
        uncaptured: why decode steps that should be CUDA graphs were none, "" if they were.
    """

    output: Any
    rng: torch.Tensor | None = None
    caches: dict[int, Any] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)
    uncaptured: str = ""
    hook_changes: Any = None
