"""Runs a rank on a pretended device. Only workers import this module, because the import gives the process pretended
devices."""

from __future__ import annotations

import gc
import inspect
import os
import textwrap
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from transformers import cache_utils
from transformers.cache_utils import Cache

from parallelformers_ng.batching.round_messages import Round, RoundOutput
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.collectives import small_sums
from parallelformers_ng.cuda_graphs.static_caches import ReusableLayer
from parallelformers_ng.kernels.side_by_side import PartOfProduct
from parallelformers_ng.kernels.step_kernels import StepKernels
from parallelformers_ng.live_code.packing import Digests
from parallelformers_ng.wire import message
from parallelformers_ng.worker.call import Answer, Call
from parallelformers_ng.worker.runner import ModelRunner
from tests.pretend_cuda import guard, process_group, stubs, symmetric
from tests.pretend_cuda.ledger import ledger, totals
from tests.pretend_cuda.memory import memory
from tests.pretend_cuda.misuse import MISUSES
from tests.pretend_cuda.tensor import DeviceTensor, device_mode

guard.load()
stubs.install()
symmetric.install()
dist.ProcessGroupNCCL = process_group.ProcessGroupNCCL
torch._C._set_only_lift_cpu_tensors(True)  # the mode then sees the copy of `torch.tensor(…, device="cuda")`
device_mode.__enter__()


def _check() -> None:
    """Assert that no fault has happened that a device would hide.

    Raises:
        AssertionError: freed memory was used.
    """
    faults, memory.faults = memory.faults, []
    assert not faults, faults


_run, _take = Rows.run, Rows._take
_steps: list[tuple[int, dict[str, int]]] = []
_rounds: list[tuple[int, dict[str, int]]] = []


_mark = totals(ledger.entries)


def _counted_run(rows: Rows, *args: int) -> list[BatchRow]:
    global _mark
    _mark = totals(ledger.entries)
    return _run(rows, *args)


def _counted_take(rows: Rows, launched: Any, later_steps: int = 0) -> list[BatchRow]:
    """Give the rows of a step their tokens, and note the number of rows and the counts since the step before. Two more
    counts: steps launched meanwhile, and queued operators that the host did not wait for."""
    global _mark
    before = _mark
    changed = _take(rows, launched, later_steps)
    _mark = totals(ledger.entries)
    not_awaited = ledger.waits[-1][0] if launched.newest is not None and ledger.waits else 0
    _steps.append((len(launched.places), {**(_mark - before), "later": later_steps, "not awaited": not_awaited}))
    return changed


Rows.run, Rows._take = _counted_run, _counted_take  # type: ignore[assignment, method-assign]
_lazy_initialization = ReusableLayer.lazy_initialization


def _no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nThe rest is advice.")


# Only ranks of `interpreting.py` have the interpreter, which takes seconds for a step.
obstacle = StepKernels.obstacle
StepKernels.obstacle = lambda self: "a pretended device has no compiler"  # type: ignore[method-assign]
message.TENSOR_CLASSES.add(DeviceTensor)  # a GPU tensor has no class of its own
DeviceTensor.__name__, DeviceTensor.__module__ = torch.Tensor.__name__, torch.Tensor.__module__


class PretendedRunner(ModelRunner):
    """A runner that works as on a GPU, and also reports transfers. Faults that a device would hide raise an error."""

    def differences(self, digests: Digests) -> Digests:
        """Return the differences of code without torch.cuda: the caller's real torch.cuda must not replace the
        stand-in. If the caller has a stand-in, too, its objects must not replace the rank's."""
        own = ("torch.cuda", "torch:", "tests.pretend_cuda")
        return super().differences({place: each for place, each in digests.items() if not place.startswith(own)})

    def run(self, call: Call) -> Answer:
        answer = super().run(call)
        _check()
        return answer

    def decode_rows(self, requested: Round) -> RoundOutput:
        before = totals(ledger.entries)
        output = super().decode_rows(requested)
        if len(output.tokens) and not (requested.joins or requested.leaves or output.ended):
            _rounds.append((requested.schedule.steps, dict(totals(ledger.entries) - before)))
        _check()
        return output

    def counted(self) -> dict[str, dict[str, int]]:
        """Return `Ledger.take`."""
        return ledger.take()

    def last_step(self) -> dict[str, int]:
        """Return the counts between the last two tokens of a generation that waits for events; 0 if the generation does
        not wait.

        "ahead" is the number of operators that the host had launched when it checked whether the previous token was the
        last.
        """
        *_, (_, before), (ahead, after), _, _ = ledger.waits or [(0, Counter())] * 4  # two more waits follow at the end
        ledger.waits.clear()
        return {"ahead": ahead, **{kind: count - before[kind] for kind, count in after.items()}}

    def steps_of_rows(self) -> list[tuple[int, dict[str, int]]]:
        """Return the number of rows and the counts of each step of batches since the last call."""
        taken = [*_steps]
        _steps.clear()
        return taken

    def rounds_of_rows(self) -> list[tuple[int, dict[str, int]]]:
        """Return the number of steps and the counts of each round since the last call. Rounds in which a row joined or
        left are missing."""
        taken = [*_rounds]
        _rounds.clear()
        return taken

    def graphs(self, fault: str = "") -> tuple[int, int]:
        """Return the numbers of recordings and replays since the last call.

        Args:
            fault: fault from now on: see `stubs.CUDAGraph`; "no room" if the last rank has no memory for caches.
        """
        graphs = stubs.CUDAGraph
        counts = graphs.recordings, graphs.replays
        graphs.recordings = graphs.replays = 0
        graphs.fault = fault
        has_room = fault != "no room" or self.rank < self.world_size - 1
        ReusableLayer.lazy_initialization = _lazy_initialization if has_room else _no_room
        return counts

    def has_trial(self) -> bool:
        """Return whether this rank has tried the kernels of decode steps."""
        trial = self.rank_state.trial
        return trial is not None and trial.mode is not None

    def static_caches(self) -> int:
        """Return the number of caches kept for recordings."""
        return len(self.rank_state.steps["call"]._caches) if "call" in self.rank_state.steps else 0

    def computed_as_one(self) -> int:
        """Return the number of layers that share a product with others."""
        return sum(isinstance(module, PartOfProduct) and module.side_by_side.agree for module in self.model.modules())

    def prefetch_as_in_5_17(self) -> None:
        """Make transformers' caches prefetch from host memory without waiting for the copy to it, as in 5.17."""
        source = inspect.getsource(Cache.update)
        wait = "self.prefetch_stream.wait_stream(torch.cuda.default_stream(key_states.device))"
        exec(textwrap.dedent(source).replace(wait, "pass"), vars(cache_utils), names := {})
        Cache.update = names["update"]

    def misuse(self, name: str, right: bool) -> str:
        """Return the error that a misuse raises; "" if it raises none."""
        try:
            MISUSES[name](right)
            torch.cuda.synchronize()
            _check()
        except (AssertionError, RuntimeError) as error:
            return str(error)
        return ""

    def live_graphs(self) -> int:
        """Return the number of graphs captured and not destroyed."""
        return sum(len(pool.users) for pool in memory.pools.values())

    def limit(self, free: int | None) -> int:
        """Leave `free` bytes free on the device; None restores the initial size. Returns the size of the device's
        memory."""
        torch.cuda.empty_cache()
        memory.limit = stubs.MEMORY if free is None else memory.reserved(self.device.index) + free
        return memory.limit

    def reserved(self, collect: bool = False) -> int:
        """Return the bytes that stay reserved after `empty_cache`.

        Args:
            collect: whether to run the garbage collector first.
        """
        if collect:
            gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def emptied(self) -> list[int]:
        """Return `stubs.emptied`."""
        return stubs.emptied

    def devices(self) -> set[str]:
        """Return the devices of the weights and buffers."""
        return {str(tensor.device) for tensor in (*self.model.parameters(), *self.model.buffers())}

    def allocated(self) -> int:
        """Return the bytes on the device."""
        return torch.cuda.memory_allocated(self.device)

    def environment(self, names: list[str]) -> list[str | None]:
        """Return the values of environment variables."""
        return [os.environ.get(name) for name in names]

    def connections(self) -> int:
        """Return the number of NCCL groups that this rank has made."""
        return process_group.groups_made

    def summed(self, count: int, dtype: str, offset: int = 0, replays: int = 0) -> tuple[torch.Tensor, int]:
        """Sum `count` elements that differ between the ranks, after `offset` elements of their storage.

        Args:
            replays: number of replays of a recorded sum; 0 for a sum that is not recorded.

        Returns:
            (sum, number of sums that the one-shot kernel computed).
        """
        own = (torch.arange(count + offset) % 7 + 0.25 * self.rank).to(getattr(torch, dtype)).to(self.device)[offset:]
        before = symmetric.sums
        if not replays:
            return self.communicator.all_reduce(own).cpu(), symmetric.sums - before
        recorder = self.recorder()
        start, total = own.clone(), torch.empty_like(own)
        _, graph = recorder.record(lambda: total.copy_(self.communicator.all_reduce(own.copy_(start))))
        assert symmetric.sums == before, "a capture computes nothing"
        for _ in range(replays):
            with self.communicator.launching():
                graph.replay()
        result = total.cpu()
        recorder.destroy(graph)
        return result, symmetric.sums - before

    def sum_with_an_absent_rank(self) -> None:
        """Sum on all ranks but rank 1, which raises."""
        if self.rank == 1:
            raise ValueError("not today")
        self.communicator.all_reduce(torch.ones(64, device=self.device))
        torch.cuda.synchronize()

    def small_sums(self) -> tuple[list[str], int]:
        """Return the log's lines about small sums, and the number of buffers that the ranks share."""
        return symmetric.lines, symmetric.live()

    def fail_once(self, message: str, mishap: bool = False) -> None:
        """Raise on rank 1 while all other ranks wait for rank 1. With `mishap`, the next group of rank 1 fails to
        connect."""
        if self.rank == 1:
            if mishap:
                os.environ[process_group.MISHAP] = "raise"
            raise ValueError(message)
        self.ping()

    def abort_next_trial(self) -> None:
        """Raise on rank 1, whose next trial of small sums aborts the group."""
        if self.rank == 1:
            usual = small_sums._obstacle

            def obstacle(*args: Any) -> str:
                small_sums._obstacle = usual
                self.communicator.abort("a caller gave up")
                return usual(*args)

            small_sums._obstacle = obstacle
            raise ValueError("for once")
        self.ping()

    def fail_alone(self) -> None:
        """Raise on rank 1 after an exchange of all ranks, while no rank waits."""
        self.ping()
        if self.rank == 1:
            raise ValueError("for nobody")

    def connect_alone(self, absent: int) -> int:
        """Connect a stage that has only this rank; all ranks must take part. Rank `absent` raises instead. Returns the
        stage's number of ranks."""
        if self.rank == absent:
            raise ValueError("not today")
        return self.communicator.within(1).world_size

    def launch_after_abort(self) -> None:
        """Launch a recorded step after a peer has aborted."""
        self.communicator.abort("a peer gave up")
        with self.communicator.launching():
            raise AssertionError("it would run on connections that are gone")
