"""Keeps what calls change in a parallelized model, for this process, for new workers and for other replicas."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.encoded import whole_node
from parallelformers_ng.checkpoint.lazy import RemoteTensor
from parallelformers_ng.checkpoint.nodes import FetchedLeaf, of_ranks
from parallelformers_ng.checkpoint.reading import read_copy
from parallelformers_ng.errors import StateLostError
from parallelformers_ng.model.marks import REMOTE
from parallelformers_ng.sharding.attributes import REMOVED, NewBuffer, OnWorkers, put_attribute
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan
from parallelformers_ng.sharding.tensors import dotted
from parallelformers_ng.wire.message import unpack
from parallelformers_ng.worker.changed_state import Change, Report

Place = tuple[Any, int]
"""A replica and its incarnation."""


class ModelState:
    """The state that calls have changed in one model.

    Args:
        plan: plan of the model.
        read: function that returns a whole tensor as it was before it changed.

    Attributes:
        new_buffers: dotted name → buffer that a call has registered.
        is_changed: whether any call has changed the model.
    """

    def __init__(self, plan: ShardPlan, read: Any) -> None:
        self._plan, self._read = plan, read
        self._whole: dict[str, torch.Tensor] = {}  # storage name → tensor that calls have changed
        self.is_changed = False
        self._count = 0  # number of changes of `whole`
        self._sent: dict[Any, tuple[int, int]] = {}  # replica → incarnation, number of the changes that it has
        self._confirmed: dict[Any, tuple[int, int]] = {}  # replica → incarnation, number of its last report
        self._kept_there: dict[str, tuple[Place, str]] = {}  # what only workers have → which workers, and why
        self._lost: dict[str, str] = {}
        self.new_buffers: dict[str, NewBuffer] = {}
        self._lock = threading.RLock()

    def prepare(self, place: Place, group: Any) -> int:
        """Give the ranks of a group the state that they lack, before a call.

        Returns:
            Number of the group's last report that this process has applied.

        Raises:
            StateLostError: workers have ended with state that this process does not have.
            GroupError: the group failed.
        """
        if not self.is_changed:
            return 0
        replica, incarnation = place
        with self._lock:
            for name, ((where, when), why) in [*self._kept_there.items()]:
                if where is replica and when != incarnation:
                    self._lost[name] = f"the workers have ended, and {why}"
                    del self._kept_there[name]
            self._check()
            if self._count and self._sent.get(replica) != (incarnation, self._count):
                ranks = range(self._plan.world_size)
                group.call_each("put_state", [({n: self._part(n, rank) for n in self._whole},) for rank in ranks])
                self._sent[replica] = incarnation, self._count
            when, number = self._confirmed.get(replica, (incarnation, 0))
            return number if when == incarnation else 0

    def _part(self, storage: str, rank: int) -> torch.Tensor:
        plan, whole = self._plan.tensors[storage], self._whole[storage]
        return plan.shards[rank].of(whole).contiguous() if whole.shape == plan.shape else whole

    def accept(self, name: str | None = None) -> None:
        """Go on without state that is lost: all of it, or an attribute by its dotted name, which has a new value."""
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

    def take(
        self,
        model: Any,
        place: Place,
        edits: Any,
        others: Iterable[Any],
        reports: Sequence[Report | None],
        failed: bool,
    ) -> None:
        """Apply the reports of a group's ranks to the model in this process.

        Args:
            model: the parallelized model.
            place: replica and incarnation of the group.
            edits: edits of the replica.
            others: edits of the other replicas.
            reports: report of each rank.
            failed: whether the call has failed, so that ranks may have stopped at different points.

        Raises:
            StateLostError: ranks that must be equal have different values.
        """
        told: dict[Any, dict[int, Change]] = collections.defaultdict(dict)
        for rank, report in enumerate(reports):
            for key, change in report.changes.items() if report is not None else ():
                told[key][rank] = change
        number = max((report.number for report in reports if report is not None), default=0)
        (replica, incarnation), everyone = place, len(reports) if self._plan.stages == 1 else 1
        with self._lock:
            if not told or number <= self._confirmed_by(place):
                return
            self.is_changed = True
            was_sent = self._sent.get(replica, (incarnation, 0)) == (incarnation, self._count)
            has_tensors = False
            for (kind, path, name), changes in told.items():
                change = next(
                    (each for each in changes.values() if each.value is not None), next(iter(changes.values()))
                )
                alike = len({each.digest for each in changes.values()}) == 1 and len(changes) >= everyone
                if kind == "tensor":
                    has_tensors = True
                    plan = self._plan.tensors[path]
                    alike |= not plan.is_replicated
                    self._take_tensor(model, plan, changes, change)
                    if not alike and not failed:
                        self._lost[path] = "the workers have different values of it"
                    was_sent &= alike
                elif kind == "config":
                    value = unpack(*change.value) if change.value is not None else REMOVED
                    owner, _, last = path.rpartition(".")
                    put_attribute(attrgetter(owner)(model), last, value)
                    if alike:
                        edits.take_config(path, value)
                else:
                    self._take_attribute(model, place, edits, others, (path, name), change, alike or failed, alike)
            if has_tensors:
                self._count += 1
                if was_sent:
                    self._sent[replica] = incarnation, self._count
                else:
                    self._sent.pop(replica, None)
            self._confirmed[replica] = incarnation, number
            self._check()

    def _confirmed_by(self, place: Place) -> int:
        when, number = self._confirmed.get(place[0], (place[1], 0))
        return number if when == place[1] else 0

    def _take_tensor(self, model: Any, plan: TensorPlan, changes: dict[int, Change], change: Change) -> None:
        if plan.is_replicated:
            if change.value is None:
                return
            whole = change.value.clone()
        else:
            before = self._whole[plan.name] if plan.name in self._whole else self._read(plan)

            def part_of(rank: int) -> torch.Tensor:
                return changes[rank].value if rank in changes else plan.shards[rank].of(before)

            whole = read_copy(whole_node(self._plan, plan, lambda part: of_ranks(part, part_of)), {})
        self._whole[plan.name] = whole
        for name in self._plan.aliases()[plan.name]:
            module, short = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            shown = (module._buffers if plan.is_buffer else module._parameters)[short]
            if plan.is_buffer and (shown.shape, shown.dtype) != (whole.shape, whole.dtype):
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
        """Give a model whose weights are gathered the buffers that calls have registered."""
        for name in self.new_buffers:
            path, _, short = name.rpartition(".")
            model.get_submodule(path)._buffers[short] = self.changed(name)

    def _take_attribute(
        self,
        model: Any,
        place: Place,
        edits: Any,
        others: Iterable[Any],
        where: tuple[str, str],
        change: Change,
        usable: bool,
        alike: bool,
    ) -> None:
        """Apply the new value of an attribute.

        Args:
            where: path of the module, and name of the attribute.
            usable: whether the value is the value of all ranks from now on.
            alike: whether all ranks have the value already.
        """
        full_name, module = dotted(*where), model.get_submodule(where[0])
        if change.of_library and (change.why_kept or not usable):
            return  # the layers of transformers keep shards of their state on the ranks
        self._kept_there.pop(full_name, None)
        value: Any
        if change.why_kept:
            self._kept_there[full_name] = place, change.why_kept
            vars(module)[where[1]] = OnWorkers(f"{full_name} is only on the workers: {change.why_kept}")
            return
        if usable and change.value is not None:
            value = unpack(*change.value)
        else:
            value = OnWorkers(
                f"{full_name} was set by the model's code, and each worker has a different value, because the plan cuts"
                " the module. It can only be read in the call that sets it; deparallelize() the model to keep it"
            )
        self._put(module, where, value, change.in_place)
        edits.take_attribute(*where, value, place[1] if alike else -1)
        for each in others:
            each.take_attribute(*where, value)

    def _put(self, module: nn.Module, where: tuple[str, str], value: Any, in_place: bool) -> None:
        name = where[1]
        before = vars(module).get(name)
        if isinstance(value, NewBuffer):
            self.new_buffers[dotted(*where)] = value
            self._show_buffer(module, dotted(*where), value.tensor)
            if not value.persistent:
                module._non_persistent_buffers_set.add(name)
        elif value is REMOVED:
            vars(module).pop(name, None)
        elif in_place and type(before) is type(value) and _is_refilled(before, value):
            pass
        else:
            vars(module)[name] = value


def _is_refilled(before: Any, value: Any) -> bool:
    """Give an object the contents of another object of its class; return False if the object cannot take them."""
    if isinstance(before, (list, collections.deque)):
        before.clear()
        before.extend(value)
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(value)
    elif isinstance(before, torch.Tensor):
        if before.shape != value.shape or before.dtype != value.dtype or before.requires_grad:
            return False
        before.copy_(value)
    elif hasattr(before, "__dict__"):
        vars(before).clear()
        vars(before).update(vars(value))
    else:
        return False
    return True
