"""Keeps what calls change in a parallelized model, for this process, for new workers and for other replicas."""

from __future__ import annotations

import collections
import enum
import functools
import threading
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from parallelformers_ng.checkpoint.encoded import whole_node
from parallelformers_ng.checkpoint.lazy import RemoteTensor
from parallelformers_ng.checkpoint.nodes import FetchedLeaf, of_ranks
from parallelformers_ng.checkpoint.reading import read_copy
from parallelformers_ng.errors import StateLostError
from parallelformers_ng.generation import object_parts
from parallelformers_ng.live_code.object_graph import own_attributes
from parallelformers_ng.model.caller_state import Edits
from parallelformers_ng.model.marks import REMOTE
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.attributes import REMOVED, NewBuffer, OnWorkers, put_attribute
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan
from parallelformers_ng.sharding.tensors import dotted
from parallelformers_ng.wire.message import unpack
from parallelformers_ng.worker.changed_state import Change, StateReport


class ModelState:
    """Keeps the tensors, buffers and attributes that calls have changed in one model.

    Args:
        plan: plan of the model.
        read: method that returns a whole tensor as it was before it changed; its object must outlive the state.

    Attributes:
        new_buffers: dotted name → buffer that a call has registered.
        is_changed: whether any call has changed the model.
    """

    def __init__(self, plan: ShardPlan, read: Any) -> None:
        self._plan = plan
        self._read: Any = weakref.WeakMethod(read)  # weak, so that the workers stop once the model is unreachable
        self._whole: dict[str, torch.Tensor] = {}  # storage name → tensor that calls have changed
        self.is_changed = False
        self._count = 0  # how often `_whole` has changed
        self._sent = weakref.WeakKeyDictionary[WorkerGroup, int]()  # value of `_count` that the group has received
        # Number of the group's last report that was applied.
        self._confirmed = weakref.WeakKeyDictionary[WorkerGroup, int]()
        self._kept_there: dict[str, tuple[WorkerGroup, str]] = {}  # attribute → the only group that has it, and why
        self._lost: dict[str, str] = {}
        self.new_buffers: dict[str, NewBuffer] = {}
        self._lock = threading.RLock()

    def prepare(self, group: WorkerGroup) -> int:
        """Before a call, send a group the changed tensors that it lacks. Return the number of the group's last report
        that this process has applied."""
        if not self.is_changed:
            return 0
        with self._lock:
            for name, (where, why) in [*self._kept_there.items()]:
                if where is not group and not where.alive:
                    self._lost[name] = f"the workers have ended, and {why}"
                    del self._kept_there[name]
            self._check()
            if self._sent.get(group, 0) != self._count:
                ranks = range(self._plan.world_size)
                group.call_each("put_state", [({n: self._part(n, rank) for n in self._whole},) for rank in ranks])
                self._sent[group] = self._count
            return self._confirmed.get(group, 0)

    def _part(self, storage: str, rank: int) -> torch.Tensor:
        plan, whole = self._plan.tensors[storage], self._whole[storage]
        return plan.shards[rank].of(whole).contiguous() if whole.shape == plan.shape else whole

    def accept(self, name: str | None = None) -> None:
        """Forget lost attributes, so that calls raise no StateLostError: all, or `name`, which the user set again."""
        if self.is_changed:
            with self._lock:
                for known in (self._lost, self._kept_there):
                    known.clear() if name is None else known.pop(name, None)

    def _check(self) -> None:
        if self._lost:
            raise StateLostError(
                "what calls of the model have changed is lost: "
                + "; ".join(f"{name} ({why})" for name, why in self._lost.items())
                + ". Set these attributes again, or call accept_lost_state() to go on with the values in this process"
            )

    def take(self, edits: Edits, group: WorkerGroup, reports: Sequence[StateReport | None], failed: bool) -> None:
        """Apply the reports of a group's ranks to the model in this process. After a failed call, ranks may have
        stopped at different points."""
        told: dict[Any, dict[int, Change]] = collections.defaultdict(dict)
        for rank, report in enumerate(reports):
            for key, change in report.changes.items() if report is not None else ():
                told[key][rank] = change
        number = max((report.number for report in reports if report is not None), default=0)
        everyone = len(reports) if self._plan.stages == 1 else 1
        with self._lock:
            if not told or number <= self._confirmed.get(group, 0):
                return
            self.is_changed = True
            count, is_sent = self._count, self._sent.get(group, 0) == self._count
            for (kind, path, name), changes in told.items():
                # Ranks that need not send the value send None, so take a change that has the value.
                change = max(changes.values(), key=lambda each: each.value is not None)
                alike = len({each.digest for each in changes.values()}) == 1 and len(changes) >= everyone
                if kind == "tensor":
                    plan = self._plan.tensors[path]
                    alike |= not plan.is_replicated
                    self._take_tensor(edits.model, plan, changes, change)
                    if not alike and not failed:
                        self._lost[path] = "the workers have different values of it"
                    is_sent &= alike
                    self._count = count + 1
                elif kind == "config":
                    value = REMOVED if change.value is None else unpack(*change.value)
                    owner, _, last = path.rpartition(".")
                    put_attribute(attrgetter(owner)(edits.model), last, value)
                    edits.take_config(group, path, value)
                elif not change.of_library or ((alike or failed) and not change.why_kept):
                    # Skip attributes of transformers' layers that differ between ranks: they are shards, and stay on
                    # the ranks.
                    self._take_attribute(edits, group, (path, name), change, alike, failed)
            if self._count > count:
                self._sent[group] = self._count if is_sent else -1
            self._confirmed[group] = number
            self._check()

    def _take_tensor(self, model: Any, plan: TensorPlan, changes: dict[int, Change], change: Change) -> None:
        if plan.is_replicated:
            if change.value is None:
                return
            whole = change.value.clone()
        else:
            before = self._whole[plan.name] if plan.name in self._whole else self._read()(plan)

            def part_of(rank: int) -> torch.Tensor:
                return changes[rank].value if rank in changes else plan.shards[rank].of(before)

            whole = read_copy(whole_node(self._plan, plan, lambda part: of_ranks(part, part_of)), {})
        self._whole[plan.name] = whole
        for name in self._plan.aliases()[plan.name]:
            path, _, short = name.rpartition(".")
            module = model.get_submodule(path)
            if plan.is_buffer and module._buffers[short].shape != whole.shape:
                self._show_buffer(module, name, whole)

    def _show_buffer(self, module: nn.Module, name: str, whole: torch.Tensor) -> None:
        """Make a new buffer, or a buffer of a new shape, readable in this process."""
        leaf = FetchedLeaf(tuple(whole.shape), whole.dtype, functools.partial(self.changed, name), name)
        tables = vars(module)[REMOTE].tables if REMOTE in vars(module) else vars(module)
        for table in (module._buffers, tables["_buffers"]):
            dict.__setitem__(table, name.rpartition(".")[2], RemoteTensor(leaf))

    def changed(self, name: str) -> Any:
        """Return a copy of a parameter or buffer that calls have changed or registered; None for other tensors."""
        if name in self.new_buffers:
            return self.new_buffers[name].tensor.clone()
        whole = self._whole.get(self._plan.tensors[name].storage)
        return None if whole is None else whole.clone()

    def put_buffers(self, model: Any) -> None:
        """Add the buffers that calls have registered to a model whose weights are gathered."""
        for name in self.new_buffers:
            path, _, short = name.rpartition(".")
            model.get_submodule(path)._buffers[short] = self.changed(name)

    def _take_attribute(
        self, edits: Edits, group: WorkerGroup, where: tuple[str, str], change: Change, alike: bool, failed: bool
    ) -> None:
        """Apply the new value of an attribute; `where` is the path of its module, and the attribute's name."""
        name, module = dotted(*where), edits.model.get_submodule(where[0])
        self._kept_there.pop(name, None)
        if change.why_kept:
            self._kept_there[name] = group, change.why_kept
            vars(module)[where[1]] = OnWorkers(f"{name} is only on the workers: {change.why_kept}")
            return
        value: Any = OnWorkers(
            f"{name} was set by the model's code, and each worker has a different value, because the plan cuts the"
            " module. Read it only in the call that sets it, or set it again"
        )
        if (alike or failed) and change.value is not None:
            value = unpack(*change.value)
        before = vars(module).get(where[1])
        if isinstance(value, NewBuffer):
            self.new_buffers[name] = value
            self._show_buffer(module, name, value.tensor)
            if not value.persistent:
                module._non_persistent_buffers_set.add(where[1])
        elif value is REMOVED:
            vars(module).pop(where[1], None)
        elif not (change.in_place and type(before) is type(value) and _is_refilled(before, value)):
            vars(module)[where[1]] = value
        edits.take_attribute(*where, value, group if alike and not isinstance(value, OnWorkers) else None)


def _is_refilled(before: Any, value: Any) -> bool:
    """Copy the contents of `value` into `before`, an object of the same class; return False if this is impossible."""
    if isinstance(before, torch.Tensor):
        fits = before.shape == value.shape and before.dtype == value.dtype and not before.requires_grad
        return bool(fits and before.copy_(value) is before)
    if isinstance(before, np.ndarray):
        fits = before.shape == value.shape and before.dtype == value.dtype and before.flags.writeable
    else:
        fits = isinstance(before, (list, collections.deque, set, bytearray))
    if fits:
        object_parts.put_items(before, value)
    elif isinstance(before, dict):
        before.clear()
        before.update(value)
    elif (old := own_attributes(before)) is None or isinstance(before, enum.Enum):
        return False
    else:
        for name, each in {**dict.fromkeys(old, object_parts.REMOVED), **(own_attributes(value) or {})}.items():
            object_parts.put_attribute(before, name, each)
    return True
