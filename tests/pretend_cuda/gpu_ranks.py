"""Ranks on pretended devices for `benchmarks/gpu_parts.py`. Only workers import this module."""

from __future__ import annotations

from benchmarks.gpu_ranks import ProfilesSteps, TellsKernels, TimesSums
from tests.pretend_cuda.worker import PretendedRunner


class PretendedSumRank(TimesSums, PretendedRunner):
    pass


class PretendedRank(TellsKernels, PretendedRunner):
    pass


class PretendedKernelRank(PretendedRunner):
    def computes_by_kernels(self) -> bool:
        return True


class PretendedProfiledRank(ProfilesSteps, PretendedRunner):
    def end_profile(self) -> tuple[str, float]:
        """Return the table of operators, and one microsecond: the profiler sees no pretended device."""
        return super().end_profile()[0], 1.0
