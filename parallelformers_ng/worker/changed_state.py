"""Finds what the model's code changes in the model on a rank: buffers, attributes, weights and configurations.

`nn.Module` records each attribute that code sets during a call. After a call, the tensors and configurations that
library code may change are checked; for models with user code, also weights and objects in attributes. For most models
these are a few comparisons of identities.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.generation.caches import mapped
from parallelformers_ng.generation.wrapping import wrap_once
from parallelformers_ng.live_code.object_graph import PLAIN, checksum, is_same
from parallelformers_ng.live_code.self_changes import own_names, renormalizes
from parallelformers_ng.live_code.state import State
from parallelformers_ng.sharding.attributes import REMOVED, NewBuffer, configurations
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import dotted, get_tensor, set_tensor
from parallelformers_ng.wire.message import parcel

Key = tuple[str, str, str]
"""("tensor", storage name, ""), ("attribute", path of a module, name) or ("config", dotted name, "")."""
_WRITE_UNSEEN = frozenset({"data", "numpy", "set_", "batch_norm", "native_batch_norm", "instance_norm"})
"""Names in code that may write to a tensor without a new version of the tensor."""
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}


@dataclass(slots=True)
class Change:
    """The new value of a tensor, attribute or configuration entry on one rank.

    Attributes:
        digest: checksum of the value, 0 for a shard.
        value: a tensor, or another value encoded by `parcel`. None on ranks that need not send it.
        why_kept: why the value cannot be sent to the caller; "" if it can.
        in_place: whether the old object itself was changed, and not replaced.
        of_library: whether library code has set the attribute, and not code of the user.
    """

    digest: int = 0
    value: Any = None
    why_kept: str = ""
    in_place: bool = False
    of_library: bool = False


@dataclass(slots=True)
class StateReport:
    """The changes on one rank that the caller has not confirmed. The caller's next call confirms `number`."""

    number: int
    changes: dict[Key, Change]


@dataclass(slots=True)
class _WatchedTensor:
    """A parameter or buffer, and its state after the latest call. `is_compared`: code may write to it without
    increasing its version counter."""

    key: Key
    module: nn.Module
    table: dict[str, Any]
    name: str
    is_compared: bool
    tensor: Any = None
    version: int = 0
    digest: int = 0

    def look(self) -> None:
        self.tensor = now = self.table.get(self.name)
        self.version = -1 if now is None or now.is_inference() else now._version
        self.digest = checksum(now) if now is not None and self.needs_digest() else 0

    def needs_digest(self) -> bool:
        is_norm = self.module.training and isinstance(self.module, _NormBase)
        return self.is_compared or self.version < 0 or is_norm

    def has_changed(self) -> bool:
        now = self.table.get(self.name)
        if now is not self.tensor or now is None:
            return now is not self.tensor
        return (self.version >= 0 and now._version != self.version) or (
            self.needs_digest() and self.digest != checksum(now)
        )


_ABSENT = object()
_stores: dict[tuple[int, str], tuple[nn.Module, Any]] | None = None
"""During a call: attributes that code has set → the module, and the value before."""
# Path by id of each module of the model, during a call. Other modules, such as a slice of layers that a forward makes,
# are ignored: recording them would make torch recompile that forward at each step.
_modules: dict[int, str] = {}


def note_stores() -> None:
    for name in ("__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module"):
        wrap_once(nn.Module, name, _noting)


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    def noting(self: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
        if _stores is not None and id(self) in _modules and (id(self), name) not in _stores:
            _stores[id(self), name] = self, _value_of(self, name)
        original(self, name, *args, **kwargs)

    return noting


def _value_of(module: nn.Module, name: str) -> Any:
    own = vars(module)
    tables = (own, *(own.get(table, {}) for table in ("_buffers", "_parameters", "_modules")))
    return next((table[name] for table in tables if name in table), _ABSENT)


class ChangedState:
    """Tracks the changes of the model on this rank that the caller has not confirmed."""

    def __init__(self, model: nn.Module, plan: ShardPlan, rank: int) -> None:
        self._model, self._plan = model, plan
        self._sends = rank % plan.stage_width == 0
        self._own = own_names(model)
        self.has_own_code = bool(self._own)
        self._paths: dict[int, str] = {}
        self._unseen: dict[Key, bool] = {}  # key → whether the old object itself was changed
        self._changed_at = 0
        self._buffers, self._weights = list[_WatchedTensor](), list[_WatchedTensor]()
        self._watches_weights = self.has_own_code
        for path, module in model.named_modules():
            self._paths[id(module)] = path
            own = self._own.get(path, frozenset()) | self._own.get(path.rpartition(".")[0], frozenset())
            self._watches_weights |= renormalizes(module)
            for table, watched in ((module._buffers, self._buffers), (module._parameters, self._weights)):
                for name in table:
                    plan_of = plan.tensors.get(dotted(path, name))
                    if plan_of is not None and plan_of.name not in plan.quantized:
                        key = ("tensor", plan_of.storage, "")
                        watched.append(_WatchedTensor(key, module, table, name, not own.isdisjoint(_WRITE_UNSEEN)))
        if plan.tiers is not None:  # do not watch offloaded layers, whose weights are replaced in each call
            self._weights = [each for each in self._weights if plan.tiers.place(each.key[1], rank) == "device"]
        for each in (*self._buffers, *self._weights):
            each.look()
        self._norms = {each.module for each in self._buffers if isinstance(each.module, _NormBase)}
        self._versions = self._quick()
        self.look_at_settings()

    def _quick(self) -> list[tuple[dict[str, Any], str, torch.Tensor, int]]:
        """Return (dict, name, tensor, version counter) of each buffer, to see quickly that no buffer was written."""
        return [(each.table, each.name, each.tensor, each.version) for each in self._buffers if each.version >= 0]

    def look_at_settings(self) -> None:
        """Record the present attributes and configurations, to detect their next change."""
        self._configs = [(prefix, part, {**vars(part)}) for prefix, part in configurations(self._model)]
        own = map(self._model.get_submodule, self._own)
        self._vars = [(module, {**vars(module)}) for module in own]
        self._objects = [
            (path, module, name, value, state)
            for path, module in (self._model.named_modules() if self._own else ())
            for name, value in (vars(module) | module._buffers).items()
            if name not in _OF_ALL_MODULES and dotted(path, name) not in self._plan.tensors and (state := State(value))
        ]

    @contextlib.contextmanager
    def during(self, number: int, confirmed: int) -> Iterator[None]:
        """Track what a call changes, even if the call fails. `number` is the request's number; `confirmed` is the
        number of the last report that the caller has applied."""
        global _stores, _modules
        if self._unseen and confirmed >= self._changed_at:
            self._unseen.clear()
        stores: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        _stores, _modules = stores, self._paths
        try:
            yield
        finally:
            _stores = None
            self._note(stores, number)

    def _note(self, stores: dict[tuple[int, str], tuple[nn.Module, Any]], number: int) -> None:
        for module, before in self._vars:  # code may have written to `__dict__`, which skips `__setattr__`
            for name in () if _has_same(vars(module), before) else {**before, **vars(module)}:
                value, of_class = before.get(name, _ABSENT), getattr_static(type(module), name, None)
                is_cached = name in _OF_ALL_MODULES or isinstance(of_class, functools.cached_property)
                if vars(module).get(name, _ABSENT) is not value and not is_cached:
                    stores.setdefault((id(module), name), (module, value))
        changed = self._attributes(stores) if stores else {}
        if self._objects:
            for path, module, name, value, state in self._objects:
                if _value_of(module, name) is value and not state.holds():
                    changed["attribute", path, name] = True
        watched = self._buffers
        if self._watches_weights or changed:
            watched = [*self._buffers, *self._weights]
        elif all(
            table.get(name) is tensor and tensor._version == version for table, name, tensor, version in self._versions
        ) and not any(module.training for module in self._norms):
            watched = []  # no buffer was written, as in most calls
        for each in watched:
            if each.has_changed():
                changed[each.key] = False
                each.look()
                self._versions = self._quick()
        settings = self._changed_settings()
        if changed or settings:
            for key in changed:
                self._make_ordinary(key)
            for key, in_place in (changed | settings).items():
                self._unseen[key] = in_place and self._unseen.get(key, True)
            self._changed_at = number
            self.look_at_settings()

    def _attributes(self, stores: dict[tuple[int, str], tuple[nn.Module, Any]]) -> dict[Key, bool]:
        changed, replaced = dict[Key, bool](), False
        for (_, name), (module, before) in stores.items():
            path, now = self._paths.get(id(module)), _value_of(module, name)
            is_own = path in self._own
            if path is None or (now is before and not is_own) or _is_equal(now, before):
                continue
            if not is_own:  # skip private attributes of libraries, which only serve one call
                replaced |= isinstance(now, nn.Module)
                if name.startswith("_") or isinstance(now, nn.Module):
                    continue
            if dotted(path, name) not in self._plan.tensors:
                changed["attribute", path, name] = now is before
        if replaced:  # skip library modules: BigBird chooses its attention anew for each length of an input
            changed = {key: in_place for key, in_place in changed.items() if key[1] in self._own}
        return changed

    def _changed_settings(self) -> dict[Key, bool]:
        changed: dict[Key, bool] = {}
        for prefix, part, before in self._configs:
            if _has_same(vars(part), before):
                continue
            for name in before.keys() | vars(part).keys():
                now = vars(part).get(name, _ABSENT)
                if now is not before.get(name, _ABSENT) and not _is_equal(now, before.get(name, _ABSENT)):
                    changed["config", prefix + name, ""] = False
                    for other_prefix, other, _ in self._configs:  # some modules have a copy of the configuration
                        if other_prefix == prefix and now is not _ABSENT:
                            vars(other)[name] = now
        return changed

    def _make_ordinary(self, key: Key) -> None:
        """Replace inference tensors in an attribute by ordinary tensors, which have version counters."""
        if key[0] == "attribute":
            module = self._model.get_submodule(key[1])
            for table in (vars(module), module._buffers):
                if key[2] in table:
                    table[key[2]] = _ordinary(table[key[2]])

    def report(self, number: int) -> StateReport | None:
        """Return the changes that the caller has not confirmed, as the report of request `number`, or None."""
        if not self._unseen:
            return None
        return StateReport(number, {key: self._change(key, in_place) for key, in_place in self._unseen.items()})

    def _change(self, key: Key, in_place: bool) -> Change:
        kind, path, name = key
        if kind == "tensor":
            plan = self._plan.tensors[path]
            tensor = get_tensor(self._model, path, plan.is_buffer).detach()
            if not plan.is_replicated:
                return Change(value=tensor)
            return Change(checksum(tensor), tensor if self._sends else None)
        if kind == "config":
            prefix, _, name = path.rpartition(".")
            part = next(part for each, part, _ in self._configs if each == f"{prefix}.")
            return self._parcel(vars(part).get(name, REMOVED), Change())
        module, change = self._model.get_submodule(path), Change(in_place=in_place, of_library=path not in self._own)
        value = _value_of(module, name)
        if name in module._buffers and value is not None:
            value = NewBuffer(value.detach(), name not in module._non_persistent_buffers_set)
        return self._parcel(REMOVED if value is _ABSENT else value, change)

    def _parcel(self, value: Any, change: Change) -> Change:
        try:
            mapped(value, (nn.Module, nn.Parameter), _refuse, in_place=False)
            data = parcel(value)
            change.digest, change.value = zlib.crc32(data[0]), data if self._sends else None
        except NotPortableError as error:
            change.why_kept = str(error)
        return change

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        names = self._plan.aliases()
        for storage, tensor in tensors.items():
            for name in names[storage]:
                set_tensor(self._model, name, tensor, self._plan.tensors[name].is_buffer)
        for each in (*self._buffers, *self._weights):
            if each.key[1] in tensors:
                each.look()
        self._versions = self._quick()


def _has_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return now == before  # fast, because `==` of dicts skips identical values
    except Exception:  # values that cannot be compared, such as tensors, count as changed
        return False


def _is_equal(now: Any, before: Any) -> bool:
    """Whether a value that code has set equals the value before."""
    if now is before:
        return isinstance(now, PLAIN)  # an object of any other type may have been changed in place
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.dtype == before.dtype and now.device == before.device and torch.equal(now, before)
    return is_same(now, before)


def _ordinary(value: Any) -> Any:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if type(tensor) is torch.Tensor and tensor.is_inference() else tensor

    if isinstance(value, list):
        value[:] = [_ordinary(item) for item in value]
        return value
    return mapped(value, torch.Tensor, copied, in_place=True)


def _refuse(part: Any) -> Any:
    raise NotPortableError(f"a {type(part).__name__} that a call has made stays on the workers")
