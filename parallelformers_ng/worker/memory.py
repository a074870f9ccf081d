"""The memory of a rank, in bytes, and the tables that `verbose=` prints."""

from __future__ import annotations

from pathlib import Path

import pynvml
import torch

_WIDTH = 75  # of torch's own tables


class RankMemory:
    """The memory of the calling process, a rank.

    Args:
        device: device of the rank.
        name: "cuda:0", "cpu:1", …; on CPU the number is the rank's.
        shard_bytes: bytes of its weights by the plan.
    """

    def __init__(self, device: torch.device, name: str, shard_bytes: int) -> None:
        self._name = name
        self._cuda = device if device.type == "cuda" else None
        self._shard_bytes = shard_bytes

    def allocated(self) -> int:
        """Return weights of its shard on CPU, all that torch has allocated on CUDA."""
        return self._shard_bytes if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def reserved(self) -> int:
        """Return the memory cost of the process: its proportional set size (PSS) on CPU, torch's pool on CUDA."""
        return proportional_set_size() if self._cuda is None else torch.cuda.memory_reserved(self._cuda)

    def line(self) -> str:
        """Format bytes in Parallelformers' form: `GPU:0 => 2.72GB`."""
        kind, _, number = self._name.partition(":")
        count = self.allocated()
        size = f"{count / 1e9:.2f}GB" if count >= 10_000_000 else f"{count / 1e6:.2f}MB"
        return f"{kind.upper() if self._cuda is None else 'GPU'}:{number} => {size}"

    def table(self) -> str:
        """On CUDA torch's own table, on CPU one of the same shape."""
        own = self._cpu_table() if self._cuda is None else torch.cuda.memory_summary(self._cuda, abbreviated=True)
        return f"{own}\n{self.line()}\n"

    def _cpu_table(self) -> str:
        rows = [
            ("Allocated memory (shard)", self._shard_bytes, self._shard_bytes),
            ("Process memory (PSS)", proportional_set_size(), _bytes_in("status", "VmHWM")),
        ]
        title = f"CPU memory summary, worker {self._name.removeprefix('cpu:')}"
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
    return _bytes_in("smaps_rollup", "Pss")


def _bytes_in(file: str, key: str) -> int:
    """Return a figure that Linux gives of this process. (The peak of `getrusage` would include that of the parent.)"""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def device_totals() -> str:
    """Return a line for every NVIDIA device of the machine: what all processes together use of it; "" if there is
    none."""
    try:
        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        used = [pynvml.nvmlDeviceGetMemoryInfo(device) for device in devices]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or a slice of a device: NVML knows no figures of it
        return ""
    return "\n".join(
        f"GPU:{index} used {memory.used / 1e9:.2f}GB of {memory.total / 1e9:.2f}GB, all processes"
        for index, memory in enumerate(used)
    )


def _in_table(count: int) -> str:
    """Format bytes in the form of torch's tables: whole units, the next one from ten thousand on."""
    size, units = float(count), ["B", "KB", "MB", "GB"]
    while size >= 10_000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}"
