"""Functions that all benchmarks share: interleaved repetition, minimum and median, and a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers


def machine() -> dict[str, Any]:
    """Return the hardware, the versions and the present load of the machine."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_1min": os.getloadavg()[0],
    }


def interleave(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call all contestants in turn, `rounds` times, so that a drift of the machine affects all contestants. Returns
    each contestant's figures."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, measure in contestants.items():
            figures[name].append(measure())
    return figures


def seconds(action: Callable[[], object]) -> float:
    """Return the wall time of one call, in seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def memory(pid: int) -> dict[str, int]:
    """Return the fields of `/proc/PID/smaps_rollup`, in bytes: "Pss", "Anonymous", "Private_Dirty", …."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def forget_peak(pid: int) -> None:
    """Reset the peak that `peak_memory` returns (`man 5 proc_pid_clear_refs`)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory(pid: int) -> int:
    """Return the peak of a process's resident memory, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def report(
    title: str, unit: str, figures: dict[str, list[float]], against: str = "", higher_is_better: bool = False
) -> None:
    """Print minimum and median of each contestant, and its median ratio to the peer `against`, round by round."""
    print(f"\n{title} [{unit}]")
    for name, values in figures.items():
        ratio = ""
        if against and name != against:
            pairs = [a / b for a, b in zip(values, figures[against], strict=True)]
            ratio = f"   {statistics.median(pairs):.2f} x {against}"
        best = max(values) if higher_is_better else min(values)
        print(f"  {name:<34} best {best:9.3f}   median {statistics.median(values):9.3f}{ratio}")


def save(path: str | None, name: str, figures: dict[str, Any]) -> None:
    """Add one benchmark's figures to a JSON file, with the machine."""
    if not path:
        return
    file = Path(path)
    known = json.loads(file.read_text()) if file.exists() else {}
    known[name] = {"machine": machine(), "figures": figures}
    file.write_text(json.dumps(known, indent=1))
