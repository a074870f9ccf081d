"""Memory reports: bytes per device, and the tables that `verbose=` prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds, in bytes.

    Attributes:
        device: "cuda:0", "cpu:1", …; on CPU the number is the rank.
        allocated: weights of its shard on CPU, all that torch has allocated on CUDA.
        reserved: what the process costs the machine: its proportional set size (PSS) on CPU, torch's pool on CUDA.
        peak: the most it has been: the peak resident size on CPU, torch's peak allocation on CUDA.
        summary: torch's own table on CUDA, "" on CPU.
    """

    device: str
    allocated: int
    reserved: int
    peak: int
    summary: str = ""


def rank_memory(device: torch.device, shard_bytes: int, rank: int = 0) -> RankMemory:
    """Measure the calling process. `shard_bytes` is what the plan says its weights take."""
    if device.type == "cuda":
        return RankMemory(
            device=str(device),
            allocated=torch.cuda.memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            peak=torch.cuda.max_memory_allocated(device),
            summary=torch.cuda.memory_summary(device, abbreviated=True),
        )
    return RankMemory(
        device=f"cpu:{rank}",
        allocated=shard_bytes,
        reserved=proportional_set_size(),
        peak=_status("VmHWM"),
    )


def proportional_set_size(pid: int | None = None) -> int:
    """PSS of a process in bytes: shared pages count by the share of each process that maps them, so sums over processes
    are right. Linux, `/proc/PID/smaps_rollup`."""
    text = Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{key}:"))


def simple_report(ranks: Sequence[RankMemory]) -> str:
    """One line per device, as Parallelformers prints it: `GPU:0 => 2.72GB`."""
    return "\n".join(f"{_label(memory.device)} => {_short(memory.allocated)}" for memory in ranks)


def detail_report(ranks: Sequence[RankMemory]) -> str:
    """A table per device. On CUDA it is torch's own; on CPU one of the same shape, from the shard and the process."""
    return "\n".join(f"{memory.summary or _cpu_table(memory)}\n{simple_report([memory])}\n" for memory in ranks)


def device_totals() -> str:
    """Used and total memory of every NVIDIA device of the machine, by all processes together; "" without NVIDIA's
    library."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        lines = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
            lines.append(f"GPU:{index} used {info.used / 1e9:.2f}GB of {info.total / 1e9:.2f}GB, all processes")
        return "\n".join(lines)
    finally:
        pynvml.nvmlShutdown()


def _short(count: int) -> str:
    return f"{count / 1e9:.2f}GB" if count >= 10_000_000 else f"{count / 1e6:.2f}MB"


def _label(device: str) -> str:
    kind, _, number = device.partition(":")
    return f"{'GPU' if kind == 'cuda' else kind.upper()}:{number}"


def _cpu_table(memory: RankMemory) -> str:
    width = 75
    rows = [
        ("Allocated memory (shard)", memory.allocated, memory.allocated),
        ("Process memory (PSS)", memory.reserved, memory.peak),
    ]
    number = memory.device.partition(":")[2]
    lines = [
        f"|{'=' * width}|",
        f"|{f'CPU memory summary, worker {number}':^{width}}|",
        f"|{'-' * width}|",
        f"|{'Metric':^36}|{'Cur Usage':^19}|{'Peak Usage':^18}|",
        f"|{'-' * width}|",
        *(f"| {name:<35}|{_mb(now):>17}  |{_mb(peak):>16}  |" for name, now, peak in rows),
        f"|{'=' * width}|",
    ]
    return "\n".join(lines)


def _mb(count: int) -> str:
    """As in torch's tables: whole units, the next one from ten thousand on."""
    size, units = float(count), ["B", "KB", "MB", "GB"]
    while size >= 10_000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}"
