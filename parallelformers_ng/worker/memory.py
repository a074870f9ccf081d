"""Measures the memory of a rank in bytes, and formats the tables that `verbose=` prints."""

from __future__ import annotations

from pathlib import Path

import pynvml
import torch

from parallelformers_ng.sharding.wording import human_bytes

_WIDTH = 75  # characters per line, as in torch's own tables


class RankMemory:
    """Measures the memory of the rank that runs in this process.

    Args:
        name: name of the device, "cuda:0", "cpu:1", …; on CPU the number is the rank.
        shard_bytes: bytes of the rank's weights on its device, from the plan.
    """

    def __init__(self, device: torch.device, name: str, shard_bytes: int) -> None:
        self._name = name
        self._cuda = device if device.type == "cuda" else None
        self._shard_bytes = shard_bytes

    def allocated(self) -> int:
        """Return the bytes of the rank's weights on CPU; on CUDA, all bytes that torch has allocated."""
        return self._shard_bytes if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def reserved(self) -> int:
        """Bytes used by the process: its proportional set size (PSS) on CPU, torch's memory pool on CUDA."""
        return proportional_set_size() if self._cuda is None else torch.cuda.memory_reserved(self._cuda)

    def line(self) -> str:
        """Return the allocated bytes in the format of Parallelformers: `GPU:0 => 2.72GB`."""
        kind, _, number = self._name.partition(":")
        count = self.allocated()
        size = f"{count / 1e9:.2f}GB" if count >= 10_000_000 else f"{count / 1e6:.2f}MB"
        return f"{kind.upper() if self._cuda is None else 'GPU'}:{number} => {size}"

    def table(self) -> str:
        """Return a table of memory: torch's own table on CUDA, a table of the same format on CPU."""
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
            *(f"| {name:<35}|{human_bytes(now):>17}  |{human_bytes(peak):>16}  |" for name, now, peak in rows),
            f"|{'=' * _WIDTH}|",
        ]
        return "\n".join(lines)


def proportional_set_size() -> int:
    """Return the PSS of this process in bytes. It divides each shared page by the number of processes that map it."""
    return _bytes_in("smaps_rollup", "Pss")


def _bytes_in(file: str, key: str) -> int:
    # Read /proc, because the peak in `getrusage` would include the parent's peak.
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def device_totals() -> str:
    """Return a line per NVIDIA device of the machine, with the memory that all processes use; "" without devices."""
    try:
        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        used = [pynvml.nvmlDeviceGetMemoryInfo(device) for device in devices]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or a MIG slice, which NVML cannot measure
        return ""
    return "\n".join(
        f"GPU:{index} used {memory.used / 1e9:.2f}GB of {memory.total / 1e9:.2f}GB, all processes"
        for index, memory in enumerate(used)
    )
