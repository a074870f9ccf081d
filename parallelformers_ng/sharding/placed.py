"""Defines the modules of a pipeline: the ranks of one stage compute a placed module, and all ranks get its output.

Every rank runs the same modelling code at the same time. The ranks that hold a placed module's weights compute it; all
other ranks receive its result. If consecutive blocks are on the same ranks, only the last block's result is sent:

    rank 0:  embed ► ─ block 0 ─ block 1 ─ ► ─────────────────────── ► ──────── ► choose a token
                    │                      │                         │         │
    rank 1:  ─────── ► ─────────────────── ► ─ block 2 ─ block 3 ─ ► ─ head ─ ► choose a token

So on every rank the code between blocks (masks, positions, norms) gets the same inputs as in a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import output_capturing

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.shared_result import share
from parallelformers_ng.runtime.limits import set_within
from parallelformers_ng.sharding.layers import ParallelLayer
from parallelformers_ng.sharding.own_heads import AllHeads, OwnHeads


@dataclass(frozen=True)
class Stop:
    """The stage that computes a placed module, and the module's position among the blocks of that stage."""

    # Ranks that hold the module's weights and compute it. The first of them sends the output to all other ranks.
    holders: tuple[int, ...]
    # Path of the `Stack` module that calls this block; None if the module is not in a list of blocks.
    stack: str | None = None
    begins: bool = True  # whether the module is the first of the stage's consecutive blocks
    ends: bool = True  # whether the module is the last of the stage's consecutive blocks
    cache_layers: tuple[int, ...] = ()  # indices of the KV cache's layers to which the module writes


@dataclass
class _Run:
    """A call of a `Stack`, during which a stage sends only the output of its last consecutive block."""

    stack: str  # path of the `Stack`
    output: Any = None  # output of another stage's last block, which all blocks of that stage return on this rank


_run: ContextVar[_Run | None] = ContextVar("run", default=None)


class _OverStages(ParallelLayer):
    """Base of the modules that exchange outputs among the ranks of all stages, not only within one stage."""

    takes_part = False
    gives_part = False
    everyone: Communicator  # communicator of all ranks

    def connect(self, everyone: Communicator, width: int) -> None:
        self.everyone = everyone


class Placed(_OverStages):
    """A module that the ranks of one stage compute, and whose result every rank gets."""

    stop: Stop  # the stage that computes the module

    @property
    def is_here(self) -> bool:
        """Whether this rank computes the module."""
        return self.everyone.rank in self.stop.holders

    @property
    def is_merged(self) -> bool:
        """Whether, in this call, other stages get only the output of the last of the stage's consecutive blocks."""
        run = _run.get()
        return run is not None and run.stack == self.stop.stack and not output_capturing._active_collector.get()

    def give(self, compute: Callable[[], Any]) -> Any:
        """Run `compute` instead of the module's forward, send the result to all other ranks, and return it.

        A collective: the stage's ranks call this method while all other ranks call the module. If `compute` raises, the
        caller must abort the communicator.
        """
        return self._share(lambda: (compute(), {}))[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stop, run = self.stop, _run.get()
        if run is None or not self.is_merged:
            return self._shared(args, kwargs, output_capturing._active_collector.get())
        if self.is_here and stop.ends:
            return self._shared(args, kwargs)
        if self.is_here:
            return super().forward(*args, **kwargs)
        if stop.begins:
            run.output = self._shared(args, kwargs)
        else:
            self._lengthen_caches((*args, *kwargs.values()))
        return run.output

    def _shared(self, args: Any, kwargs: Any, collector: dict[str, Any] | None = None) -> Any:
        """Return the output on all ranks. Also send the outputs of inner modules that transformers collects in
        `collector`, such as hidden states."""
        notes = {name: items for name, items in (collector or {}).items() if isinstance(items, list)}

        def compute() -> Any:
            before = {name: len(items) for name, items in notes.items()}
            output = super(Placed, self).forward(*args, **kwargs)
            return output, {name: items[before[name] :] for name, items in notes.items()}

        if self.is_here:
            return self._share(compute)[0]
        self._lengthen_caches((*args, *kwargs.values()))
        output, noted = self._share(None)
        for name, items in noted.items():
            notes[name].extend(items)
        return output

    def _share(self, compute: Callable[[], Any] | None) -> Any:
        device = next((tensor.device for tensor in chain(self.parameters(), self.buffers())), torch.device("cpu"))
        holders, rank = self.stop.holders, self.everyone.rank
        if len(holders) == 1:
            return share(self.everyone, holders[0], compute, device)
        # The ranks of a stage have different heads, so they gather all heads. Each receiver keeps the heads of its
        # position in its own stage.
        every = None if compute is None else lambda: tree_map_only(OwnHeads, AllHeads.of, compute())
        result = share(self.everyone, holders[0], every, device)
        return tree_map_only(AllHeads, lambda heads: heads.own_of(rank % len(holders)), result)

    def _lengthen_caches(self, values: Sequence[Any]) -> None:
        """Add zeros to this rank's KV caches, so that the caches are as long as on the module's own stage."""
        caches = [value for value in values if isinstance(value, Cache)] if self.stop.cache_layers else []
        for cache in caches:
            states = next(value for value in values if isinstance(value, torch.Tensor) and value.ndim > 1)
            for index in self.stop.cache_layers:
                _lengthen(cache, index, states)


class Stack(_OverStages):
    """A module that calls placed blocks one after another. A stage sends only the output of its last block, unless a
    hook or an option of the call needs the output of every block."""

    stack_path: str  # path of this module in the model
    stack_lists: Sequence[str]  # names of the module's lists of blocks (`ModuleList`)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with set_within(_run, None if self._is_watched(kwargs) else _Run(self.stack_path)):
            return super().forward(*args, **kwargs)

    def _is_watched(self, kwargs: dict[str, Any]) -> bool:
        config = getattr(self, "config", None)
        flags = (kwargs.get(name, getattr(config, name, False)) for name in _OUTPUT_FLAGS)
        return any(flags) or any(_has_hooks(block) for name in self.stack_lists for block in getattr(self, name))


_OUTPUT_FLAGS = ("output_hidden_states", "output_attentions")  # arguments that ask for the output of every block


def _has_hooks(block: nn.Module) -> bool:
    """Return whether a block has hooks that may read its inputs or outputs; hooks with `is_blind` do not."""
    hooks = (*block._forward_hooks.values(), *block._forward_pre_hooks.values())
    known = (hook for hook in hooks if not getattr(hook, "is_blind", False))
    return any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in known)


def _lengthen(cache: Any, index: int, states: torch.Tensor) -> None:
    """Add tokens of zeros to one layer of a KV cache, as many as `states` `[batch, tokens, …]` has."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if hasattr(layer, "has_previous_state"):  # only convolutions and linear attention have this
        had_state = layer.has_previous_state
        layer.has_previous_state = dict.fromkeys(had_state, True) if isinstance(had_state, dict) else True
    if layer is None or hasattr(layer, "get_seq_length"):
        keys = getattr(layer, "keys", None)
        heads, width = (1, 1) if keys is None or keys.ndim < 4 else (keys.shape[1], keys.shape[3])
        tokens = states.new_zeros(states.shape[0], heads, states.shape[1], width)
        cache.update(tokens, tokens, index)
