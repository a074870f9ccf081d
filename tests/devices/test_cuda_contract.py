"""Tests that the contract has every name of CUDA, NCCL and NVML that the package uses, with its source."""

from __future__ import annotations

import ast
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Backend, Work, _SymmetricMemory

import parallelformers_ng
from tests.pretend_cuda import contract, stubs

PACKAGE = Path(parallelformers_ng.__file__).parent
_LIBRARIES = re.compile(r"(torch\.(cuda|distributed)|pynvml)\.|torch\.(OutOfMemoryError|AcceleratorError)$")
_VARIABLES = re.compile(r"\b(?:NCCL|TORCH|CUDA|PYTORCH|NVIDIA|GLOO)_[A-Z0-9_]+")
_KEYWORDS = {"pin_memory", "non_blocking"}
_OBJECTS = (torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph, torch.Generator, Backend, Work, _SymmetricMemory)
_OTHERS = (str, dict, list, set, torch.Tensor, torch.device, socket.socket, threading.Thread, Executor, Future)
_MEMBERS = {name for kind in _OBJECTS for name in dir(kind)} - {name for kind in _OTHERS for name in dir(kind)}
_MEMBERS |= {"record_stream", "asyncOp", "_timeout"}
_MEMBERS -= {"rank", "world_size", "name", "seed", "broadcast"}  # attributes of many objects here


def uses(source: str) -> tuple[set[str], set[str]]:
    """Return the names and environment variables that a module uses. A method is returned as `.name`, for any
    object."""
    tree = ast.parse(source)
    imported = imports_of(tree)
    names = {full for full in imported.values() if _LIBRARIES.match(full)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            full = ".".join([imported.get(first, first), *rest])
            names |= {full} if _LIBRARIES.match(full) and "(" not in full else set()
    if names or "cuda_graphs" in source:
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {f".{name}" for name in attributes & _MEMBERS}
    names |= {f"{node.arg}=" for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in _KEYWORDS}
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return names, {variable for text in texts for variable in _VARIABLES.findall(text)}


def imports_of(tree: ast.AST) -> dict[str, str]:
    """Return a map from each name in a module to the full name that it imports."""
    return dict(_imported(tree))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2 for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def unknown(names: set[str]) -> list[str]:
    """Return the names that the contract lacks."""
    return sorted(name for name in names if name not in _REST and not any(map(_is(name), contract.NAMES)))


def _is(name: str) -> Callable[[str], bool]:
    return (lambda full: full.endswith(name)) if name.startswith(".") else (lambda full: full == name)


_REST = {"torch.cuda", "torch.distributed"}


@pytest.fixture(scope="module")
def used() -> tuple[set[str], set[str]]:
    uses_by_file = [uses(path.read_text()) for path in PACKAGE.rglob("*.py")]
    return set().union(*(names for names, _ in uses_by_file)), set().union(
        *(variables for _, variables in uses_by_file)
    )


def test_all_names_are_in_the_table(used: tuple[set[str], set[str]]) -> None:
    names, variables = used
    assert unknown(names) == []
    assert sorted(variables - contract.ENVIRONMENT.keys()) == []


def test_the_table_has_no_name_that_nothing_uses(used: tuple[set[str], set[str]]) -> None:
    names, variables = used
    unused = [full for full in contract.NAMES if not any(_is(name)(full) for name in names)]
    assert unused == []
    assert contract.ENVIRONMENT.keys() - variables == set()


@pytest.mark.parametrize(
    ("source", "due"),
    [
        ("import torch\ntorch.cuda.ipc_collect()", ["torch.cuda.ipc_collect"]),
        (
            "import torch.distributed as dist\ndist.ReduceOp.SUM",
            ["torch.distributed.ReduceOp", "torch.distributed.ReduceOp.SUM"],
        ),
        ("from torch.cuda import nvtx", ["torch.cuda.nvtx"]),
        ("import torch\ntorch.cuda.Stream(0).query()", [".query"]),
        (
            "import torch.distributed as dist\ndef f(group: dist.Store): group.allgather_coalesced([])",
            [".allgather_coalesced"],
        ),
        ("import pynvml\npynvml.nvmlInit(); pynvml.nvmlDeviceGetName(0)", ["pynvml.nvmlDeviceGetName"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_name_that_is_not_there_is_found(source: str, due: list[str]) -> None:
    assert unknown(uses(source)[0]) == due


def test_variables_are_read_from_texts() -> None:
    assert uses("'set NCCL_P2P_LEVEL=NVL'")[1] == {"NCCL_P2P_LEVEL"}


def test_torch_has_names_without_cuda() -> None:
    assert [name for name in contract.missing() if not contract.NAMES[name].cuda_build] == []


def test_stand_in_has_all_called_names() -> None:
    """Only the caller calls `is_initialized` of `torch.cuda`, and only the fork server `_is_in_bad_fork`."""
    called = [name.split(".")[2] for name in contract.NAMES if name.startswith("torch.cuda.")]
    assert {name for name in called if name not in stubs.STUBS} == {"_is_in_bad_fork"}
    assert all(entry.returns and entry.source for entry in [*contract.NAMES.values(), *contract.ENVIRONMENT.values()])
