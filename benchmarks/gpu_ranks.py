"""Ranks of `benchmarks.gpu_parts`: with and without Triton kernels, and for sums. Only workers import this."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType

from parallelformers_ng.collectives.small_sums import SmallSums
from parallelformers_ng.kernels.step_kernels import StepKernels
from parallelformers_ng.worker.runner import ModelRunner

SUMS, REPLAYS = 100, 5


class TellsKernels:
    """A method of a rank that tells what computes its decode steps; for a class with a ModelRunner."""

    rank_state: Any

    def computes_by_kernels(self) -> bool:
        """Return whether the Triton kernels compute the recorded decode steps, as a trial has decided."""
        return self.rank_state.trial is not None and self.rank_state.trial.mode == "kernels"


class WithKernels(TellsKernels, ModelRunner):
    """A rank as usual."""


class WithoutKernels(TellsKernels, ModelRunner):
    """A rank whose decode steps are computed by the modules."""

    def __init__(self, *arguments: Any) -> None:
        StepKernels.obstacle = lambda self: "switched off for a comparison"  # type: ignore[method-assign]
        super().__init__(*arguments)


class ProfilesSteps:
    """Methods of a rank that profiles its requests; for a class with a ModelRunner.

    Attributes:
        kernel_count: number of kernels and copies of the device in the last profile.
    """

    kernel_count = 0
    _profile: torch.profiler.profile | None = None

    def begin_profile(self) -> None:
        """Start to profile this rank, its device included if it has one."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def end_profile(self) -> tuple[str, float]:
        """End the profile; return (table of operators and kernels, the longest first; microseconds of all kernels)."""
        assert self._profile is not None, "begin_profile was not called"
        self._profile.stop()
        events = self._profile.key_averages()
        on_device = sum(event.self_device_time_total for event in events)
        self.kernel_count = sum(event.count for event in events if event.device_type != DeviceType.CPU)
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        return events.table(sort_by=order, row_limit=30, max_name_column_width=70), on_device


class Profiled(ProfilesSteps, ModelRunner):
    """A rank that profiles its requests."""


class TimesSums:
    """Methods of a rank that times recorded sums; for a class with a ModelRunner."""

    communicator: Any
    device: torch.device
    recorder: Any

    def microseconds_of_sum(self, nbytes: int, by_nccl: bool) -> float:
        """Return the microseconds of one bf16 sum of `nbytes`, the shortest of some replays of recorded sums.

        Args:
            by_nccl: whether NCCL computes the sum. All ranks must get the same arguments.

        Raises:
            RuntimeError: NCCL computes all sums of this group.
        """
        small: SmallSums | None = self.communicator._small
        tensor = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self.device)
        if not by_nccl and (small is None or not small.can_sum(tensor)):
            raise RuntimeError("NCCL computes all sums; the log of the group's start says why")
        recorder = self.recorder()
        self.communicator._small = None if by_nccl else small
        try:
            _, graph = recorder.record(lambda: [self.communicator.all_reduce(tensor) for _ in range(SUMS)])
        finally:
            self.communicator._small = small
        times = []
        for _ in range(REPLAYS):
            with self.communicator.launching():
                times.append(recorder.milliseconds(graph))
        recorder.destroy(graph)
        return min(times) * 1e3 / SUMS


class SumRank(TimesSums, ModelRunner):
    """A rank that times sums."""
