"""Checks of a CUDA build of torch without a GPU: `make cuda-build` runs this in a venv of its own.

    python -m benchmarks.cuda_build [--results benchmarks/results/cuda_build.json]

- Every module of the package is imported.
- Every name of `tests/pretend_cuda/contract.py` exists, and accepts the keywords that the package uses. torch's or
  NVIDIA's libraries contain every environment variable of the contract.
- Neither the imports nor the fork server nor a forked CPU rank opens the driver. A stand-in library for the driver
  records each process that opens it.
- Every operator that `tests/pretend_cuda/kernels.py` counts as one kernel is registered for CUDA.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import parallelformers_ng
from tests.devices.test_cuda_contract import imports_of
from tests.pretend_cuda import contract

ROOT = Path(__file__).parents[1]
PACKAGE = Path(parallelformers_ng.__file__).parent
_DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <string.h>
/* libcublasLt opens the file when torch is imported, which does no harm; a driver that was asked for something does. */
static void note(void) {
    FILE *notes = fopen(getenv("DRIVER_NOTES"), "a");
    fprintf(notes, "%d\\n", getpid());
    fclose(notes);
}
int cuInit(unsigned flags) { note(); return 100; } /* CUDA_ERROR_NO_DEVICE */
int cuDriverGetVersion(int *version) { note(); *version = 13030; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, int *status) {
    note();
    *found = 0;
    if (!strcmp(name, "cuInit")) *found = (void *)cuInit;
    if (!strcmp(name, "cuDriverGetVersion")) *found = (void *)cuDriverGetVersion;
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}
"""
_LIFE = """
import os
from benchmarks import cuda_build
cuda_build.imports()
from parallelformers_ng.model.groups import RUNNER
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.preload import warm_up
warm_up()
group = WorkerGroup(2, "cpu", target=RUNNER, timeout=60)
group.call("ping")
pids = [os.getpid(), *group.pids]
group.close()
print("QUIET", *pids, flush=True)
try:
    WorkerGroup(1, "cuda", target=RUNNER, timeout=60)
except Exception as error:
    print("REFUSED", type(error).__name__, str(error).splitlines()[0][:200], flush=True)
"""
"""A program that imports all modules, forks two CPU ranks, and then forks a rank for a device, which opens the
driver."""
_FUSED = ("aten::_fused_rms_norm", "aten::native_layer_norm", "aten::_scaled_dot_product_efficient_attention")


def imports() -> list[str]:
    """Return the modules that cannot be imported, each with its error."""
    failed = []
    for module in pkgutil.walk_packages(parallelformers_ng.__path__, "parallelformers_ng."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("ray"):  # ray is optional
                failed.append(f"{module.name}: {error}")
        except Exception as error:
            failed.append(f"{module.name}: {type(error).__name__}: {error}")
    return failed


def keywords() -> tuple[int, list[str]]:
    """Check the keyword arguments in the package's calls of torch functions that `contract.NAMES` lists.

    Returns:
        Number of keyword arguments, and the keyword arguments that the installed torch does not accept.
    """
    refused: list[str] = []
    count = 0
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = imports_of(tree)
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not isinstance(call.func, (ast.Attribute, ast.Name)):
                continue
            first, *rest = ast.unparse(call.func).split(".")
            name = ".".join([imported.get(first, first), *rest])
            if name in contract.NAMES and (function := _torch_object(name)) is not None:
                used = [keyword.arg for keyword in call.keywords if keyword.arg]
                where = f"{path.name}:{call.lineno} {name}"
                count += len(used)
                refused += [f"{where}({word}=)" for word in used if not _takes(function, word)]
    return count, refused


def _torch_object(name: str) -> Any:
    value: Any = torch
    for part in name.split(".")[1:] if name.startswith("torch.") else ():
        value = getattr(value, part, None)
    return None if value is torch else value


def _takes(function: Any, keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in function: its docstring lists the keywords
        text = f"{function.__doc__} {getattr(getattr(function, '__init__', None), '__doc__', '')}"
        return f"{keyword}:" in text or f"{keyword}=" in text
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def variables() -> list[str]:
    """Return the environment variables of the contract that no library of torch or NVIDIA contains."""
    site = Path(torch.__file__).parents[1]
    libraries = [*(site / "torch" / "lib").glob("*.so*"), *site.glob("nvidia/**/libnccl*.so*")]
    sources = [site / "torch" / "cuda" / "__init__.py", *(site / "torch" / "distributed").rglob("*.py")]
    texts = [path.read_bytes() for path in (*libraries, *sources)]
    return [name for name in contract.ENVIRONMENT if not any(name.encode() in text for text in texts)]


def unregistered() -> list[str]:
    """Return the operators of `_FUSED` without their own CUDA kernel."""
    return [name for name in _FUSED if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]


@contextlib.contextmanager
def driver() -> Iterator[tuple[dict[str, str], Path]]:
    """Build a driver without devices that records the processes that open it. Yields an environment in which the driver
    is found, and the path of the records."""
    with tempfile.TemporaryDirectory() as folder:
        source, library, notes = Path(folder, "driver.c"), Path(folder, "libcuda.so.1"), Path(folder, "notes")
        source.write_text(_DRIVER)
        notes.touch()
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        yield os.environ | {"LD_LIBRARY_PATH": folder, "DRIVER_NOTES": str(notes)}, notes


def opened() -> tuple[list[str], str]:
    """Return the processes that opened the driver although they must not, and the last output of a rank for a
    device."""
    with driver() as (environment, notes):
        probe = "import torch; torch.cuda.is_available()"
        subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True)
        if not notes.read_text():
            return ["nobody opens the driver that is to note it: the check shows nothing"], ""
        notes.write_text("")
        done = subprocess.Popen([sys.executable, "-c", _LIFE], env=environment, stdout=subprocess.PIPE, text=True)
        assert done.stdout is not None
        quiet: list[str] = []
        wrong: list[str] = []
        ended = ""
        for line in done.stdout:
            word, *rest = line.split()
            if word == "QUIET":
                quiet = rest
                wrong = [f"process {pid} opened the driver before a rank was to" for pid in notes.read_text().split()]
            elif word == "REFUSED":
                ended = " ".join(rest)
        if done.wait() or not quiet:
            wrong.append(f"the program ended with status {done.returncode}")
        wrong += [
            f"process {pid}, which has no device, opened the driver"
            for pid in notes.read_text().split()
            if pid in quiet
        ]
        if not notes.read_text():
            wrong.append("a rank for a device did not open the driver")
        return wrong, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", default=str(ROOT / "benchmarks" / "results" / "cuda_build.json"))
    options = parser.parse_args()
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} is a build without CUDA: pip found it first; ask for another version")
    from_driver, ended = opened()
    used, refused = keywords()
    wrong = {
        "modules that cannot be imported": imports(),
        "names of the table that are not there": contract.missing(),
        "keywords that they do not take": refused,
        "variables that no library names": variables(),
        "operators without a kernel": unregistered(),
        "the driver": from_driver,
    }
    for what, places in wrong.items():
        print(f"{what}: {', '.join(places) or 'none'}")
    print(f"a rank for a device, of which there is none: {ended}")
    file = Path(options.results)
    known = json.loads(file.read_text()) if file.exists() else {}
    key = f"torch {torch.__version__}"
    known[key] = {
        "Python": platform.python_version(),
        "transformers": transformers.__version__,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "names of the table": len(contract.NAMES),
        "variables of the table": len(contract.ENVIRONMENT),
        "keywords": used,
        "a rank for a device": ended,
        "wrong": {what: places for what, places in wrong.items() if places},
        **{name: value for name, value in known.get(key, {}).items() if name == "tests"},
    }
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    sys.exit(1 if any(wrong.values()) else 0)


if __name__ == "__main__":
    main()
