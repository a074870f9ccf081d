"""Turns the modules of a model into remote modules and back: each class is replaced by a subclass of the same name.

Modules without weights, such as activations, become a `PlainPart`, and also compute in the caller's process.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import operator
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from parallelformers_ng.checkpoint.save_pretrained import write_pretrained
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.around import state_of_adapters
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.marks import REMOTE
from parallelformers_ng.model.methods import place_of, public_methods
from parallelformers_ng.model.read_attributes import AGAIN, FROZEN, is_frozen_code, may_be_read
from parallelformers_ng.model.remote_module import (
    FIXED,
    Remote,
    RemoteModule,
    lock,
    refusal,
    remote_of,
    replaced,
    unlock,
)
from parallelformers_ng.origins import is_known
from parallelformers_ng.sharding.attributes import REMOVED

_homes: weakref.WeakKeyDictionary[Any, list[tuple[weakref.ref[Calls], str]]] = weakref.WeakKeyDictionary()
"""Plain part → (calls, path) in each parallelized model with the module; models may share an activation module."""


class PlainPart(nn.Module):
    """Mixin that comes before the class of a module without weights while its model is parallelized.

    Attributes that the model's code may read, except `training`, are also set on the workers; see `may_be_read`.
    Setting a module, a weight or an attribute of `FIXED` raises ParallelError.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        self._send(name, value, "setting")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._send(name, REMOVED, "deleting")
        super().__delattr__(name)

    def _send(self, name: str, value: Any, doing: str) -> None:
        """Set or delete an attribute on the workers of every parallelized model that contains this module."""
        homes = _homes.get(self, [])
        whose = f"{homes[0][1] if homes else type(self).__name__} belongs to a parallelized model and does not support"
        if name in FIXED or isinstance(value, (nn.Module, nn.Parameter)):
            raise ParallelError(
                f"{whose} {doing} {name}: the workers have a copy of the module. Call deparallelize() first"
            )
        for home, path in homes:
            calls = home()
            if calls is None:
                continue
            if is_frozen_code(self, name, value, calls.names):
                raise ParallelError(f"{whose} changing {name}: {FROZEN}. {AGAIN}")
            if name != "training" and may_be_read(self, name, value, calls.names):
                calls.set_attribute(path, name, value)


def enter(model: nn.Module, calls: Calls, root: type) -> None:
    """Make the modules of `model` remote modules, in place. `root` is the mixin class of the model itself."""
    remote, plain = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
    for path, module in model.named_modules():
        (plain if path and _computes_here(module) else remote).append((path, module))
    for path, module in remote:
        vars(module)[REMOTE] = Remote(model, calls, path)
        lock(module)
        _replace_class(module, RemoteModule if path else root)
    for path, module in plain:
        if not isinstance(module, PlainPart):
            _replace_class(module, PlainPart)
        _homes.setdefault(module, []).append((weakref.ref(calls), path))
    # `leave` needs these lists, because the user may replace dicts of submodules.
    remote_of(model).parts = [module for path, module in remote if path]
    remote_of(model).plain_parts = [module for _, module in plain]


def leave(model: nn.Module, gather: Callable[[], None]) -> None:
    """Undo `enter`. `gather` puts the weights back into the model; if it raises an error, the modules stay remote."""
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
        _homes[part] = [home for home in _homes[part] if home[0]() is not calls]
        if not _homes[part]:  # the module is in no other parallelized model
            del _homes[part]
            _restore_class(part)
    for module in (*modules, *remote_of(model).around):
        _restore_class(module)
        del vars(module)[REMOTE]


def _computes_here(module: nn.Module) -> bool:
    """Whether a module computes the same here as on a rank: its modules have no weights or buffers, and do not read
    `training` in `forward`."""
    for part in module.modules():
        code = getattr(type(part).forward, "__code__", None)
        if part._parameters or part._buffers or (code is not None and "training" in code.co_names):
            return False
    return True


def _replace_class(module: nn.Module, mixin: type) -> None:
    cls: Any = type(module)
    module.__class__ = _replacement(mixin, cls)


def _restore_class(module: Any) -> None:
    """Give a module its original class again, which its replacement class stores as `_whole_class`."""
    object.__setattr__(module, "__class__", type(module)._whole_class)


class _StandIn(type):
    """Metaclass of the replacement classes: calling such a class, or `isinstance` with it, uses the original class."""

    _whole_class: type[nn.Module]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._whole_class(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._whole_class)


def _as_whole(cls: _StandIn) -> Any:
    return operator.itemgetter(0), ((cls._whole_class,),)


@functools.cache
def _replacement(mixin: type, cls: Any) -> Any:
    """Create a subclass of `mixin` and `cls` that has the name and module of `cls`, for saving and printing."""
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own = {name for base in cls.__mro__ if not is_known(base) for name in vars(base)}
    members |= {name: inspect.getattr_static(cls, name) for name in own & _of_class(mixin)}
    mixin_names = {
        name for base in mixin.__mro__[: mixin.__mro__.index(nn.Module)] for name in vars(base)
    } - members.keys()
    for name in () if mixin is PlainPart else public_methods(cls):
        place = place_of(cls, name)
        if name not in mixin_names and place != "local":
            original = getattr(cls, name)
            members[name] = _saved(original) if place == "saved" else replaced(place, name, original)
    kind: Any = _StandIn if type(cls) is type else type("_StandIn", (_StandIn, type(cls)), {})
    copyreg.pickle(kind, _as_whole)
    combined = kind(cls.__name__, (mixin, cls), members)
    combined._whole_class = cls
    return combined


def _of_class(mixin: type) -> set[str]:
    """Return the names of the mixin's methods that a class of the user may override."""
    names = {name for name in vars(mixin) if not name.startswith("_")} - {"deparallelize", "hf_device_map"}
    return names | {"state_dict", "__enter__", "__exit__", "__repr__", "__str__"}


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
        if getattr(self, "_hf_peft_config_loaded", False):  # transformers' method then saves only the active adapters
            names: Any = self.active_adapters
            state = state_of_adapters(self, names())
            return original(self, save_directory, state_dict=state, max_shard_size=max_shard_size)
        remote = remote_of(self)
        deployment, prefix = remote.calls.deployment, f"{remote.path}." if remote.path else ""
        every = (*deployment.plan.tensors, *deployment.state.new_buffers)
        names = [name for name in every if name.startswith(prefix)]
        nodes = {name.removeprefix(prefix): deployment.node(name) for name in names}
        write_pretrained(self, nodes, Path(save_directory), max_shard_size, save_original_format, progress)

    return save_pretrained
