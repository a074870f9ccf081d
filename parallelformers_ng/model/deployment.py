"""Manages the groups of workers, the plan and the shard memory of a parallelized model."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.encoded import whole_node
from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.nodes import Node, leaf_of, of_ranks
from parallelformers_ng.checkpoint.progress import Progress, progress_bar
from parallelformers_ng.checkpoint.quantized_in_memory import ConvertedLayers
from parallelformers_ng.checkpoint.reading import read_copy, read_shard
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import ShardStore, hand_over, take_back
from parallelformers_ng.checkpoint.writing import WrittenFile
from parallelformers_ng.cuda_graphs.modes import StaticSteps
from parallelformers_ng.errors import GroupError, PlacementError, SharedMemoryError
from parallelformers_ng.generation.cache_registry import CacheRegistry
from parallelformers_ng.live_code.loaded_by_path import specs_by_path
from parallelformers_ng.model.assistants import Assistants
from parallelformers_ng.model.caller_state import send_environment
from parallelformers_ng.model.groups import StoredModel
from parallelformers_ng.model.live_code import LiveCode
from parallelformers_ng.model.model_state import ModelState
from parallelformers_ng.options import WorkerOptions
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.spawn import module_path
from parallelformers_ng.runtime.supervisor import Supervisor
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import WHOLE, TensorPlan
from parallelformers_ng.wire.frame import OUT_OF_MEMORY, why_no_memory


class Replica(Supervisor):
    """A group of workers that has the whole model and serves calls.

    If a worker ends, all ranks of its group end. After `keep_alive`, a new group then loads the same weights.

    Args:
        group: a group that is running or starting.
        make_group: function that starts a new group after `group` has died. If `make_group` is None, `group`
            belongs to the caller: `leave` does not end the group, and a dead group is not replaced.

    Attributes:
        steps: mode that compiles or captures decode steps; None for ordinary decode steps, also after the workers have
            failed to capture a step.
        in_flight: number of running calls; with one replica, always 0.
    """

    def __init__(self, group: WorkerGroup, make_group: Callable[[], WorkerGroup] | None) -> None:
        if group.in_use:
            gc.collect()  # frees a model that is unreachable, but in a reference cycle
        if group.in_use:
            raise PlacementError("the group in workers= serves another model; end that model first, or use a new group")
        group.user = weakref.ref(self)
        super().__init__(group)
        self.caches = CacheRegistry(self)
        self.assistants = Assistants()
        self.steps: StaticSteps | None = None
        self.in_flight = 0
        self._make_group = make_group

    def keep_alive(self, stored: StoredModel, options: WorkerOptions) -> None:
        """Whenever a worker ends, replace the group by a new one, unless the group belongs to the caller."""
        if self._make_group is not None:
            again = functools.partial(stored.revive, self._make_group)
            self.supervise(again, options.max_restarts, options.restart_window)

    def leave(self) -> None:
        """Stop the workers; a group that belongs to the caller only drops the model. Idempotent."""
        group = self.group
        if self._make_group is not None:
            self.close()
        elif group.user is not None and group.user() is self and group.alive:
            group.call("drop")
            group.user = None


class Deployment:
    """The workers of one model and the weights that the workers use.

    Attributes:
        plan: plan of the model.
        replicas: groups of workers, each with the whole model. On CPU all replicas map the same memory.
        stored: what a new group needs to load the model; None if only the ranks have the weights.
        ended: whether the workers have ended.
        state: changes that calls have made to the model.
        code: the code that the model runs in this process.

    Args:
        model: the model with loaded weights. After `start` the model's tensors are on `meta`.
        plan: plan of the model.
        replicas: groups of workers, each with the plan's world size.
        options: whether and how often a dead group is replaced, which needs kept weights. On CPU the memory in which
            the workers received the weights is kept: it is the shards themselves. On CUDA that memory is kept
            for `host_copy=True`, or if a checkpoint has most of the weights.
        show_progress: whether to show a progress bar while the weights are gathered.
        checkpoint: files of the tensors that are not loaded in the model. The workers read the checkpoint files at the
            start and after a restart.
        original: original form of a model that was quantized in memory; `restore` restores it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        replicas: Sequence[Replica],
        *,
        options: WorkerOptions,
        checkpoint: Checkpoint | None,
        show_progress: bool,
        original: ConvertedLayers | None,
    ) -> None:
        self.plan = plan
        self.replicas = list(replicas)
        self.show_progress = show_progress
        self._given = original
        self._checkpoint = checkpoint or Checkpoint({})
        is_copied = self.replicas[0].group.device == "cpu" or options.host_copy
        self._keeps_weights = is_copied or checkpoint is not None
        self._options = options
        self._lock = threading.Lock()
        self.ended = False
        self.code = LiveCode(model, plan)
        self._skeleton = Skeleton.of(model, plan, self.code.by_value)
        self.stored: StoredModel | None = None
        self.state = ModelState(plan, self.read)

    def start(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Build the model on the ranks, then load the weights on the ranks.

        Steps without weights run first, so that most errors occur before any weight has left the model. On failure, the
        method restores the weights of `model` and calls `close`.
        """
        try:
            for replica in self.replicas:
                replica.group.wait_until_ready()
                self._refuse_weights_from_here(type(model).__name__, replica)
                if replica is self.replicas[0]:
                    self._find_foreign_code(model, replica.group)
                replica.group.call("build", self._skeleton)
            store = ShardStore(self._checkpoint.in_memory(self.plan))
            stored = self.stored = StoredModel(self._skeleton, self.plan, store, self._checkpoint)
            handed = self._checkpoint.of_model(self.plan)
            self._checkpoint.copy(store)
            hand_over(model, store, handed, progress)
            try:
                store.settle()
                for replica in self.replicas:
                    stored.load(replica.group, progress)
                    progress = None  # all replicas load the same bytes, so only the first reports progress
                    if self._options.restart and self._keeps_weights:
                        replica.keep_alive(stored, self._options)
            except BaseException:
                take_back(model, store.plan, store.read, handed)
                raise
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno in OUT_OF_MEMORY:
                needed = sum(self.plan.bytes_per_rank)
                raise SharedMemoryError(
                    f"no memory for {needed} bytes of shards: {why_no_memory(error)}; the model is unchanged. Raise the"
                    " memory limit, or pass dtype= for smaller weights"
                ) from error
            raise
        if not self._keeps_weights:
            self._release_store()

    def _find_foreign_code(self, model: nn.Module, group: WorkerGroup) -> None:
        """Add to the skeleton the code that the ranks of a group cannot import or import differently."""
        group.call("extend_path", module_path(), specs_by_path())
        send_environment(group)
        modules_by_value = set(self.code.by_value)
        changes = self.code.compare(functools.partial(group.call, "differences"))
        if self.code.by_value != modules_by_value:  # the skeleton must contain the modules that ranks cannot import
            self._skeleton = Skeleton.of(model, self.plan, self.code.by_value)
        self._skeleton.code = changes

    def _refuse_weights_from_here(self, name: str, replica: Replica) -> None:
        """Raise PlacementError if weights of this process would have to be sent to another host."""
        hosts = replica.group.hosts
        if hosts is None or hosts.are_here or (self._checkpoint.nodes and not self._checkpoint.copied):
            return
        why = "fit= keeps some weights here" if self._checkpoint.copied else "the model is loaded in this process"
        raise PlacementError(
            f"the weights of {name} cannot be sent to the hosts {', '.join(hosts.names)}: {why}. Pass a path"
            " that all hosts can read, or the id of a model on the hub, and leave out fit={'max_memory': …}"
        )

    @property
    def incarnation(self) -> int:
        """Number of restarts of all replicas together."""
        return sum(replica.incarnation for replica in self.replicas)

    @property
    def pids(self) -> list[int]:
        return [pid for replica in self.replicas for pid in replica.group.pids]

    @property
    def device_names(self) -> list[str]:
        return [name for replica in self.replicas for name in replica.group.device_names]

    def ping(self) -> None:
        """Make all ranks of the first working replica exchange a message. Raise GroupError if no replica works."""
        errors: list[GroupError] = []
        for replica in self.replicas:
            try:
                group, _, deadline = replica.ready()
                return group.call("ping", deadline=deadline)
            except GroupError as error:
                errors.append(error)
        raise errors[0]

    def memory(self, what: str) -> dict[str, Any]:
        """Call the method `what` of `RankMemory` on all ranks; return device name → result."""
        memory: dict[str, Any] = {}
        for replica in self.replicas:
            group, _, deadline = replica.ready()
            names = group.device_names
            memory |= zip(names, group.call_each("memory", [(what, name) for name in names], deadline), strict=True)
        return memory

    def gathering(self, what: str, total: int) -> contextlib.AbstractContextManager[Progress]:
        """Progress bar over `total` bytes; invisible if `show_progress` is false."""
        return progress_bar(f"gathering {what}", total, self.show_progress)

    def node(self, name: str) -> Node:
        """Return a `Node` that reads one parameter or buffer when needed, from files, shared memory or the ranks."""
        if (changed := self.state.changed(name)) is not None:
            return leaf_of(changed)
        if name in self._checkpoint.nodes:
            return self._checkpoint.nodes[name]
        tensor = self.plan.tensors[self.plan.tensors[name].storage]
        if self.stored is not None:
            return self.stored.store.node(tensor)
        return whole_node(self.plan, tensor, lambda part: of_ranks(part, functools.partial(self._exported, part)))

    def save(self, directory: Path, names: list[str], limit: int, progress: Progress) -> list[list[WrittenFile]]:
        """Make every rank of replica 0 write its shards to a sharded directory, in files of at most `limit` bytes.
        `progress` counts the bytes of rank 0."""
        group, *_ = self.replicas[0].ready()
        self.state.prepare(group)
        return group.call_each("save", [(str(directory), names, limit)], on_event=progress)

    def gather(self, model: nn.Module) -> None:
        """Put the weights back into the model, on CPU, and stop the workers. `restore` restores quantized layers."""
        self.replicas[0].group.check_process()
        with self._lock:
            if self.stored is not None:
                self._leave_groups()  # stops the workers, so that reading a tensor can free its memory
            with self.gathering(type(model).__name__, self.plan.bytes_whole) as advance:
                names = self.plan.tensors.keys() - (self._given.names if self._given is not None else set())
                take_back(model, self.plan, self.read, names, advance)
                self.state.put_buffers(model)
            self._leave_groups()
            self._release_store()

    def restore(self) -> None:
        """Restore the original form of a model that was quantized in memory; the caller must call `gather` first."""
        if self._given is not None:
            self._given.restore()

    def close(self) -> None:
        """Stop the workers and free the weights. Idempotent."""
        with self._lock:
            self._leave_groups()
            self._release_store()

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        """Return a whole parameter or buffer, on CPU, with the model's shape and data type.

        The tensor is a private mapping of the checkpoint file if it is stored whole. Otherwise it is a copy from
        checkpoint files or shared memory, or from the ranks if only the ranks have the weights.
        """
        if (changed := self.state.changed(tensor.name)) is not None:
            return changed
        if tensor.storage in self._checkpoint.nodes:
            return read_shard(self._checkpoint.nodes[tensor.storage], WHOLE)
        if self.stored is not None:
            return self.stored.store.read(tensor, release)
        return read_copy(self.node(tensor.name), {})

    def _exported(self, tensor: TensorPlan, rank: int) -> torch.Tensor:
        """Return a rank's shard of a tensor, read from the rank: CUDA devices may have the only copy."""
        group = self.replicas[0].group
        names_per_rank = [([tensor.storage] if each == rank else [],) for each in range(group.world_size)]
        return group.call_each("export", names_per_rank)[rank][0]

    def _release_store(self) -> None:
        if self.stored is not None:
            self.stored.store.close()
            self.stored = None

    def _leave_groups(self) -> None:
        for replica in self.replicas:
            replica.leave()
        self.ended = True
