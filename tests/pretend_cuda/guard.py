"""Compiles a guard for CUDA devices, which torch's dispatcher calls for each tensor that claims to be on a device."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@functools.cache
def load() -> None:
    """Let this process switch between CUDA devices without effect. The guard is compiled once for each version of
    torch, in seconds."""
    torch.ops.load_library(str(_built()))


def _built() -> Path:
    version = hashlib.sha256(f"{torch.__version__} {torch.__file__} {_SOURCE}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"parallelformers_ng-pretend-cuda-{os.getuid()}" / f"{version}.so"
    if library.exists():
        return library
    from torch.utils.cpp_extension import include_paths  # a slow import, needed only to compile

    library.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, compiled = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_SOURCE)
        includes = [f"-I{path}" for path in include_paths()]
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10"]
        assert COMPILER is not None
        command = [COMPILER, "-std=c++20", "-fPIC", "-shared", *includes, str(source), "-o", str(compiled), *libraries]
        subprocess.run(command, check=True)
        compiled.replace(library)  # atomic, if several processes build it
    return library
