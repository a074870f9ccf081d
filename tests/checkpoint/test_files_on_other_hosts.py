"""Tests reading checkpoint files on a host that did not open them."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from parallelformers_ng.checkpoint import files
from parallelformers_ng.checkpoint.files import CheckpointFile, PickleFile, SafetensorsFile
from parallelformers_ng.errors import CheckpointError


def from_elsewhere(file: CheckpointFile) -> CheckpointFile:
    """Return the file object that a process of another host receives."""
    file._seen_from = ("another machine", file._seen_from[1])
    return pickle.loads(pickle.dumps(file))


def test_file_is_found_by_path_or_in_cache(tmp_path, monkeypatch):
    first_cache, own_cache = tmp_path / "there", tmp_path / "here"
    place = "models--org--name/snapshots/0123abc/model.safetensors"
    (first_cache / place).parent.mkdir(parents=True)
    save_file({"weight": torch.arange(6.0)}, first_cache / place)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(first_cache))
    file = SafetensorsFile(first_cache / place)
    assert from_elsewhere(file).tensor("weight").tolist() == list(range(6))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_cache))
    shutil.move(first_cache / place, tmp_path / "moved")
    fetched = []

    def fetch(repository, name, revision):
        fetched.append((repository, name, revision))
        if not (own_cache / place).exists():
            (own_cache / place).parent.mkdir(parents=True)
            shutil.move(tmp_path / "moved", own_cache / place)
        return str(own_cache / place)

    monkeypatch.setattr(files, "hf_hub_download", fetch)
    assert from_elsewhere(file).tensor("weight").tolist() == list(range(6))
    assert fetched == [("org/name", "model.safetensors", "0123abc")]


def test_other_numbers_in_bin_file_are_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.arange(6.0)}, path)
    file = PickleFile(path)
    shutil.copy(path, tmp_path / "copy")
    path.unlink()
    shutil.copy(tmp_path / "copy", path)
    assert from_elsewhere(file).tensor("weight").tolist() == list(range(6))
    torch.save({"weight": torch.arange(6.0) + 1}, path)
    with pytest.raises(CheckpointError, match="a different file of that name"):
        from_elsewhere(file).tensor("weight")


@pytest.mark.parametrize("change", ["gone", "longer", "of the same length"])
def test_another_file_on_another_host_is_refused(tmp_path, change):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6.0)}, path)
    file = SafetensorsFile(path)
    path.unlink()
    if change != "gone":
        save_file(
            {"weight" if change == "longer" else "wejght": torch.arange(6.0 if change != "longer" else 8.0)}, path
        )
    with pytest.raises(CheckpointError, match=rf"host .* has no file {path}, .* pass a path that all hosts can read"):
        from_elsewhere(file).tensor("weight")
