"""Runs Python like in a GPU image, with a pretended device: `python -m tests.pretend_cuda.image -m pytest …`.

The module replaces the interpreter of `benchmarks/gpu.sh`. Packages that a GPU image lacks cannot be imported, neither
in this process nor in workers. The compiler returns the step uncompiled.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from dataclasses import replace
from importlib.abc import MetaPathFinder
from typing import Any

ABSENT = {"fastapi", "flask", "gevent", "llguidance", "openai", "playwright", "uvicorn"}


class _Absent(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}, as in a GPU image", name=name)


def pretend() -> None:
    """Give this process and its workers pretended devices."""
    os.environ["PRETENDED_COMPILER"] = "as it is"
    import torch

    from parallelformers_ng.model import groups
    from tests.pretend_cuda import worker  # noqa: F401
    from tests.pretend_cuda.caller import TARGET
    from tests.pretend_cuda.tensor import DeviceMode, DeviceTensor

    torch.distributed.is_nccl_available = lambda: True
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.cuda()` needs this for tensor subclasses
    torch.cuda.is_initialized = lambda: False  # the stand-in survives forks
    profile = torch.profiler.profile
    torch.profiler.profile = lambda activities: profile(activities=activities[:1])  # the host's profiler
    groups.RUNNER = TARGET
    for cls in (DeviceTensor, DeviceMode):
        cls.__module__ = "torch"  # the stand-in does not count as the program's code


def main() -> None:
    sys.meta_path.insert(0, _Absent())
    kind, what, *arguments = sys.argv[1:]
    sys.argv = [what if kind == "-m" else kind, *arguments]
    pretend()
    if kind == "-c":
        exec(what, {"__name__": "__main__"})
    elif what == "benchmarks.gpu_all":
        _make_small("benchmarks.gpu", {"PROMPT": 12, "TOKENS": 6, "ROUNDS": 1})
        from tests.kernels.triton.interpreter import interpret

        interpret()
        ranks = "tests.pretend_cuda.gpu_ranks:Pretended"
        numbers = {
            "ROWS": (1, 2),
            "CONTEXTS": (8,),
            "CALLERS": (1, 2),
            "WARM_UPS": 1,
            "BURSTS": 1,
            "TOKENS": 8,
            "MIN_BYTES": 0,
            "PROMPT": 8,
        }
        kinds = {"with kernels": f"{ranks}KernelRank", "without": f"{ranks}Rank"}
        classes = {
            "RANKS": kinds,
            "SUM_RANK": f"{ranks}SumRank",
            "PROFILED_RANK": f"{ranks}ProfiledRank",
            "SUM_BYTES": (64,),
        }
        _make_small("benchmarks.gpu_parts", numbers | classes)
        _make_small("benchmarks.gpu_alone", {"RANKS": (1, 8), "ROWS": (1, 2), "PROMPTS": (8,), "TOKENS": 8})
        from benchmarks import gpu_all

        _make_small(what, {"PARTS": {name: replace(part, seconds=600) for name, part in gpu_all.PARTS.items()}}).main()
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def _make_small(name: str, values: dict[str, Any]) -> Any:
    """Return a module after its constants were replaced."""
    program: Any = importlib.import_module(name)
    if name == "benchmarks.gpu":
        program.copy_bandwidth = lambda device: 1e9
    for constant, value in values.items():
        setattr(program, constant, value)
    return program


if __name__ == "__main__":
    main()
