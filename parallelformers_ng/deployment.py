"""What stands behind a parallelized model: its plan, its worker group and the memory that holds its shards."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import Progress, ShardStore, hand_over, take_back
from parallelformers_ng.errors import GroupClosedError, GroupError, RequestTimeoutError, WorkerDiedError
from parallelformers_ng.memory import RankMemory
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.leaves import FileDescriptor
from parallelformers_ng.sharding.plan import ShardPlan

log = logging.getLogger("parallelformers_ng")

REPLICA = "parallelformers_ng.runtime.replica:Replica"


@dataclass(frozen=True)
class RestartLimit:
    """How many restarts within how many seconds are an accident; one more is a storm, and the group stays down."""

    count: int = 3
    seconds: float = 60.0


class Deployment:
    """Owns the workers of one model and the weights they map.

    A group whose worker died is not mended: all ranks live and die together, and a new group maps the same memory.

    Args:
        model: the model, weights loaded. After `start` its tensors are on `meta`.
        plan: how it is cut.
        make_group: starts a group for the plan's world size; None where `group` is given.
        group: a group that is running already, to be used and left running; it is not replaced when it dies.
        restart: whether a dead group is replaced.
        limit: when to give up replacing it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        make_group: Callable[[], WorkerGroup] | None,
        *,
        group: WorkerGroup | None = None,
        restart: bool = True,
        limit: RestartLimit | None = None,
    ) -> None:
        self.plan = plan
        self._make_group = make_group
        self._restart = restart and group is None
        self._borrowed = group is not None
        self._limit = limit or RestartLimit()
        self._restarts: deque[float] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._skeleton = Skeleton.of(model, plan)
        self._group = group if group is not None else self._start_group()
        self._store: ShardStore | None = None

    def start(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Build the ranks, then hand the weights over. On failure the model has its weights again.

        Everything that can fail without weights fails before the first byte is given up.
        """
        try:
            self._group.call("build", self._skeleton)
            self._store = ShardStore(self.plan)
            hand_over(model, self._store, progress)
            try:
                self._attach()
            except BaseException:
                take_back(model, self._store)
                raise
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the replicas and return rank 0's answer. `options` are those of `WorkerGroup.call`.

        A request that a dying worker interrupted is not run again: the caller is told, and decides.
        """
        return self._living_group().call(method, *args, **options)

    @property
    def device_names(self) -> list[str]:
        return self._group.device_names

    @property
    def pids(self) -> list[int]:
        return self._group.pids

    def memory(self) -> list[RankMemory]:
        """A report of each rank."""
        group = self._living_group()
        return group.call_each("memory", [()] * group.world_size)

    def gather(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Stop the workers and put the weights back into the model, on CPU."""
        with self._lock:
            self._leave_group()
            if self._store is not None:
                take_back(model, self._store, progress=progress)
                self._store.close()
                self._store = None

    def close(self) -> None:
        """Stop the workers and let the weights go. Idempotent."""
        with self._lock:
            self._leave_group()
            if self._store is not None:
                self._store.close()
                self._store = None

    def _leave_group(self) -> None:
        if self._borrowed and not self._closed and self._group.alive:
            self._group.call("drop")
        elif not self._borrowed:
            self._group.close()
        self._closed = True

    def _living_group(self) -> WorkerGroup:
        if self._group.alive or not self._restart:
            return self._group
        with self._lock:
            if self._closed:
                raise GroupClosedError("the model is no longer parallelized: its workers were stopped")
            if not self._group.alive:
                self._replace_group()
        return self._group

    def _replace_group(self) -> None:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._limit.seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._limit.count:
            raise GroupError(
                f"the workers died {len(self._restarts) + 1} times within {self._limit.seconds:.0f} s; not starting them"
                " again. model.deparallelize() gives the weights back"
            )
        self._restarts.append(now)
        self._group.close()
        self._group = self._start_group()
        self._group.call("build", self._skeleton)
        self._attach()
        log.warning("workers restarted in %.1f s", time.monotonic() - now)

    def _start_group(self) -> WorkerGroup:
        assert self._make_group is not None, "a borrowed group is never replaced"
        return self._make_group()

    def _attach(self) -> None:
        assert self._store is not None
        ranks = range(self.plan.world_size)
        fds = [tuple(FileDescriptor(fd) for fd in self._store.fds_for(rank)) for rank in ranks]
        self._group.call_each("attach", fds)
