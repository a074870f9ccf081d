"""Tests that available memory is the smallest limit along the path of control groups, on machines described by
files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.checkpoint import store
from parallelformers_ng.collectives import control_groups
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.errors import SharedMemoryError
from tests.strangers.agreement import assert_agree, prompt
from tests.zoo.decoders import gpt2

MIB = 1 << 20


def group(folder: Path, version: int, limit: int | str, usage: int, droppable: int = 0) -> None:
    """Write the files of one control group, sizes in bytes."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {droppable}\n{prefix}active_file 0\n")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    return tmp_path


def test_version_2(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "own_groups", lambda: [("", "/pod/box")])
    group(root / "pod" / "box", 2, "max", 50 * MIB)
    group(root / "pod", 2, 100 * MIB, 70 * MIB, droppable=10 * MIB)
    assert available_memory() == 40 * MIB
    group(root / "pod" / "box", 2, 64 * MIB, 50 * MIB)
    assert available_memory() == 14 * MIB


def test_version_1(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "own_groups", lambda: [("cpu", "/docker/box"), ("memory", "/docker/box")])
    group(root / "memory" / "docker" / "box", 1, 0x7FFFFFFFFFFFF000, 50 * MIB)
    machine = available_memory()
    assert machine > 100 * MIB
    group(root / "memory" / "docker", 1, 100 * MIB, 130 * MIB, droppable=60 * MIB)
    assert available_memory() == 30 * MIB


def test_path_outside_the_containers_view_is_handled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control groups of version 1 without a namespace use the host's name of the group; the group's files are at the
    top."""
    monkeypatch.setattr(control_groups, "own_groups", lambda: [("memory", "/docker/box")])
    group(root / "memory", 1, 100 * MIB, 40 * MIB)
    assert available_memory() == 60 * MIB


@pytest.mark.parametrize("left", [0, 3000])
def test_weights_beyond_the_limit_raise_beforehand(groups, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    whole, model = gpt2(), gpt2()
    monkeypatch.setattr(store, "available_memory", lambda: left)
    with pytest.raises(SharedMemoryError, match="Cannot allocate memory") as caught:
        parallelize(model, workers=groups(2))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOMEM
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(model(prompt(5)).logits, whole(prompt(5)).logits)
    parallelize(model, workers=groups(2))
    assert_agree(model, whole, prompt(5))
    model.deparallelize()
