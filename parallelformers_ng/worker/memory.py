"""What a rank holds, in bytes, and as the tables that `verbose=` prints."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_WIDTH = 75  # of torch's own tables


class RankMemory:
    """The memory of the calling process, a rank.

    Args:
        device: where it computes.
        rank: its number.
        shard_bytes: what the plan says its weights take.

    Attributes:
        device: "cuda:0", "cpu:1", …; on CPU the number is the rank.
    """

    def __init__(self, device: torch.device, rank: int, shard_bytes: int) -> None:
        self.device = str(device) if device.type == "cuda" else f"cpu:{rank}"
        self._cuda = device if device.type == "cuda" else None
        self._shard_bytes = shard_bytes

    def allocated(self) -> int:
        """Weights of its shard on CPU, all that torch has allocated on CUDA."""
        return self._shard_bytes if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def reserved(self) -> int:
        """What the process costs the machine: its proportional set size (PSS) on CPU, torch's pool on CUDA."""
        return proportional_set_size() if self._cuda is None else torch.cuda.memory_reserved(self._cuda)

    def line(self) -> str:
        """As Parallelformers prints it: `GPU:0 => 2.72GB`."""
        kind, _, number = self.device.partition(":")
        count = self.allocated()
        size = f"{count / 1e9:.2f}GB" if count >= 10_000_000 else f"{count / 1e6:.2f}MB"
        return f"{kind.upper() if self._cuda is None else 'GPU'}:{number} => {size}"

    def table(self) -> str:
        """On CUDA torch's own table and what all processes take of the device; on CPU a table of the same shape."""
        if self._cuda is None:
            return f"{self._cpu_table()}\n{self.line()}\n"
        free, total = torch.cuda.mem_get_info(self._cuda)
        used = f"{(total - free) / 1e9:.2f}GB of {total / 1e9:.2f}GB used by all processes"
        return f"{torch.cuda.memory_summary(self._cuda, abbreviated=True)}\n{self.line()}, {used}\n"

    def _cpu_table(self) -> str:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows = [
            ("Allocated memory (shard)", self._shard_bytes, self._shard_bytes),
            ("Process memory (PSS)", proportional_set_size(), peak),
        ]
        title = f"CPU memory summary, worker {self.device.removeprefix('cpu:')}"
        lines = [
            f"|{'=' * _WIDTH}|",
            f"|{title:^{_WIDTH}}|",
            f"|{'-' * _WIDTH}|",
            f"|{'Metric':^36}|{'Cur Usage':^19}|{'Peak Usage':^18}|",
            f"|{'-' * _WIDTH}|",
            *(f"| {name:<35}|{_in_table(now):>17}  |{_in_table(peak):>16}  |" for name, now, peak in rows),
            f"|{'=' * _WIDTH}|",
        ]
        return "\n".join(lines)


def proportional_set_size() -> int:
    """PSS of this process in bytes: shared pages count by the share of each process that maps them, so sums over
    processes are right. Linux, `/proc/PID/smaps_rollup`."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def _in_table(count: int) -> str:
    """As in torch's tables: whole units, the next one from ten thousand on."""
    size, units = float(count), ["B", "KB", "MB", "GB"]
    while size >= 10_000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}"
