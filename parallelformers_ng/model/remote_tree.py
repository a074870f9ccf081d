"""Turns the modules of a model into remote modules and back: each class is replaced by a subclass of the same name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from parallelformers_ng.checkpoint.save_pretrained import write_pretrained
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.around import state_of_adapters
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.methods import place_of, public_methods
from parallelformers_ng.model.plain_parts import computes_here, enter_plain, leave_plain
from parallelformers_ng.model.remote_module import (
    REMOTE,
    Remote,
    RemoteModule,
    lock,
    refusal,
    remote_of,
    replaced,
    unlock,
)
from parallelformers_ng.model.stand_in import stand_in, whole_class


def enter(model: nn.Module, calls: Calls, root: type) -> None:
    """Make the modules of `model` remote modules, in place.

    Args:
        model: the model.
        calls: calls of the model.
        root: mixin class of the model itself; submodules get `RemoteModule`, or `PlainPart` if `computes_here`.
    """
    remote, plain = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
    for path, module in model.named_modules():
        (plain if path and computes_here(module) else remote).append((path, module))
    for path, module in remote:
        vars(module)[REMOTE] = Remote(model, calls, path)
        lock(module)
        cls: Any = type(module)
        module.__class__ = _remote_class(RemoteModule if path else root, cls)
    for path, module in plain:
        enter_plain(module, calls, path)
    # Kept, because a program may replace the model's tables of modules.
    remote_of(model).parts = [module for path, module in remote if path]
    remote_of(model).plain_parts = [module for _, module in plain]


def leave(model: nn.Module, gather: Callable[[], None]) -> None:
    """Undo `enter`; if `gather` raises an exception, the modules stay remote, and the exception is passed on.

    Args:
        model: the parallelized model.
        gather: function that puts the weights back into the model.
    """
    modules = (model, *remote_of(model).parts)
    for module in modules:
        unlock(module)
    try:
        gather()
    except BaseException:
        for module in modules:
            lock(module)
        raise
    calls = remote_of(model).calls
    calls.hooks.leave()
    for part in remote_of(model).plain_parts:
        leave_plain(part, calls)
    for module in (*modules, *remote_of(model).around):
        object.__setattr__(module, "__class__", whole_class(type(module)))
        del vars(module)[REMOTE]


@functools.cache
def _remote_class(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    mixin_names = {name for base in mixin.__mro__[: mixin.__mro__.index(nn.Module)] for name in vars(base)}
    members = {}
    for name in public_methods(cls):
        place = place_of(cls, name)
        if name not in mixin_names and place != "local":
            original = getattr(cls, name)
            members[name] = _saved(original) if place == "saved" else replaced(place, name, original)
    return stand_in(mixin, cls, members)


def _saved(original: Callable) -> Callable:
    def save_pretrained(
        self: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "50GB",
        save_original_format: bool = True,
        progress: bool = True,
        **unsupported: Any,
    ) -> None:
        """Write an ordinary checkpoint for `from_pretrained`; this process never has the whole model in memory.

        Args:
            save_directory: target folder; created if it does not exist.
            max_shard_size: maximum size of a file, as a number of bytes or as text such as "5GB".
            save_original_format: whether to undo transformers' conversions, the same as
                transformers' `save_pretrained`.
            progress: whether to show a progress bar if standard error is a terminal.
            unsupported: other arguments of the original method, which are refused.

        Raises:
            ParallelError: an argument is not supported.
            CheckpointError: `max_shard_size` is not a size, or a checkpoint file is damaged or has changed.
            GroupError: only the workers have the weights, and the workers failed or have ended.
            OSError: the disk is full, or the directory cannot be written to.
        """
        if not isinstance(self, RemoteModule):
            return original(self, save_directory, max_shard_size=max_shard_size, **unsupported)
        if unsupported:
            raise ParallelError(
                refusal(self, f"save_pretrained({', '.join(unsupported)}=…)", "the workers have the weights")
            )
        if getattr(self, "_hf_peft_config_loaded", False):  # transformers saves only the active adapter
            names: Any = self.active_adapters
            state = state_of_adapters(self, names())
            return original(self, save_directory, state_dict=state, max_shard_size=max_shard_size)
        remote = remote_of(self)
        deployment, prefix = remote.calls.deployment, f"{remote.path}." if remote.path else ""
        names = [name for name in deployment.plan.tensors if name.startswith(prefix)]
        nodes = {name.removeprefix(prefix): deployment.node(name) for name in names}
        write_pretrained(self, nodes, Path(save_directory), max_shard_size, save_original_format, progress)

    return save_pretrained
