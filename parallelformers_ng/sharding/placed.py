"""Defines placed modules, the parts of a pipeline: the ranks of one stage compute the module for all ranks.

Every rank runs the same modelling code at the same time. The ranks that hold a placed module's weights compute it; all
other ranks receive its result. If consecutive blocks are on the same ranks, only the last block's result is sent:

    rank 0:  embed ► ─ block 0 ─ block 1 ─ ► ─────────────────────── ► ──────── ► choose a token
                    │                      │                         │         │
    rank 1:  ─────── ► ─────────────────── ► ─ block 2 ─ block 3 ─ ► ─ head ─ ► choose a token

So on every rank the modelling code between blocks (masks, positions, norms) gets the inputs that it gets in one
process.
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
    """The stage that computes a module."""

    # ranks that hold the module's weights. The first holder sends its result to all other ranks.
    holders: tuple[int, ...]
    # path of the module that runs this block and other blocks one after another; None outside such a module
    stack: str | None = None
    begins: bool = True  # whether the module is the first of its consecutive blocks on the same ranks
    ends: bool = True  # whether the module is the last of its consecutive blocks on the same ranks
    cache_layers: tuple[int, ...] = ()  # indices of the cache layers that the module writes to


@dataclass
class _Run:
    """A run of consecutive blocks of one stack. On other stages, every block of the run returns the run's output."""

    stack: str
    output: Any = None


_run: ContextVar[_Run | None] = ContextVar("run", default=None)


class _OverStages(ParallelLayer):
    """Base of modules that exchange results among all ranks, not only within one stage."""

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
        """Whether other stages need only the last result of the module's run of consecutive blocks, in this call."""
        run = _run.get()
        return run is not None and run.stack == self.stop.stack and not output_capturing._active_collector.get()

    def give(self, compute: Callable[[], Any]) -> Any:
        """Run `compute` in place of the module's own forward, send the result to all other ranks, and return it.

        A collective: holders of the module call this method while all other ranks call the module. Exceptions of
        `compute` are passed on; the caller must then abort the communicator.
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
        """Return the output on all ranks; also send the outputs that `collector` gathered beneath the module."""
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
        # Each rank of a stage has its own heads; ranks at the same position of each stage have the same heads.
        every = None if compute is None else lambda: tree_map_only(OwnHeads, AllHeads.of, compute())
        result = share(self.everyone, holders[0], every, device)
        return tree_map_only(AllHeads, lambda heads: heads.own_of(rank % len(holders)), result)

    def _lengthen_caches(self, values: Sequence[Any]) -> None:
        """Lengthen this rank's caches by the tokens that the module adds to the caches of its own stage."""
        caches = [value for value in values if isinstance(value, Cache)] if self.stop.cache_layers else []
        for cache in caches:
            states = next(value for value in values if isinstance(value, torch.Tensor) and value.ndim > 1)
            for index in self.stop.cache_layers:
                _lengthen(cache, index, states)


class Stack(_OverStages):
    """A module that runs placed blocks one after another. Unless code reads the results between blocks, only the last
    result of each run is sent."""

    stack_path: str  # path of the module
    stack_lists: Sequence[str]  # names of the module's lists of blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with set_within(_run, None if self._is_watched(kwargs) else _Run(self.stack_path)):
            return super().forward(*args, **kwargs)

    def _is_watched(self, kwargs: dict[str, Any]) -> bool:
        config = getattr(self, "config", None)
        flags = (kwargs.get(name, getattr(config, name, False)) for name in _LOOKS)
        return any(flags) or any(_has_hooks(block) for name in self.stack_lists for block in getattr(self, name))


_LOOKS = ("output_hidden_states", "output_attentions")  # arguments by which a caller wants the outputs of every block


def _has_hooks(block: nn.Module) -> bool:
    """Return whether a block has hooks that read its inputs or outputs. Hooks with `is_blind` read neither."""
    hooks = (*block._forward_hooks.values(), *block._forward_pre_hooks.values())
    known = (hook for hook in hooks if not getattr(hook, "is_blind", False))
    return any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in known)


def _lengthen(cache: Any, index: int, states: torch.Tensor) -> None:
    """Add as many tokens to one layer of a cache as `states` has; each token is zeros."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if hasattr(layer, "has_previous_state"):  # a layer of convolution or linear attention
        had_state = layer.has_previous_state
        layer.has_previous_state = dict.fromkeys(had_state, True) if isinstance(had_state, dict) else True
    if layer is None or hasattr(layer, "get_seq_length"):
        keys = getattr(layer, "keys", None)
        heads, width = (1, 1) if keys is None or keys.ndim < 4 else (keys.shape[1], keys.shape[3])
        tokens = states.new_zeros(states.shape[0], heads, states.shape[1], width)
        cache.update(tokens, tokens, index)
