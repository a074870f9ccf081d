"""Tests that exceptions of the program's signal handlers reach the program while a checkpoint is read.

The handlers raise what damaged files and failed downloads raise, too: `signal.alarm` with a TimeoutError is common.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from parallelformers_ng.checkpoint import files, location, store
from parallelformers_ng.checkpoint.files import PickleFile, SafetensorsFile
from parallelformers_ng.checkpoint.location import Location, open_weights, stored_quantization
from parallelformers_ng.errors import CheckpointError
from tests.helpers.saved_model import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of one file, beside an index that names this file, and a `.bin` file."""
    place = save_tiny_model(tmp_path_factory.mktemp("checkpoint"))
    torch.save({"weight": torch.ones(2)}, place / "weights.bin")
    indexed = place / "indexed"
    indexed.mkdir()
    (indexed / "part.safetensors").hardlink_to(place / "model.safetensors")
    (indexed / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "part.safetensors"}}')
    return place


@pytest.fixture(params=[TimeoutError, ValueError, KeyError], ids=lambda kind: kind.__name__)
def raised(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """Install a signal handler that raises an exception, and return its class."""

    def alarm(*_: Any) -> None:
        raise request.param("the alarm rang")

    before = signal.signal(signal.SIGUSR1, alarm)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


def strike(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGUSR1)


def _on_another_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    path = folder / "cache/models--org--name/snapshots/0123abc/weights.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((folder / "weights.bin").read_bytes())
    file = PickleFile(path)
    path.unlink()
    file._seen_from = ("another machine", file._seen_from[1])
    return file.name_to_open


def _configuration(folder: Path, _: Any) -> Any:
    return lambda: location.read_source(str(folder), {})


def _weights(folder: Path, _: Any) -> Any:
    return lambda: open_weights(Location(str(folder)))


def _indexed(folder: Path, _: Any) -> Any:
    return lambda: open_weights(Location(str(folder / "indexed")))


def _quantization(folder: Path, _: Any) -> Any:
    return lambda: stored_quantization(Location(str(folder)))


PLACES: dict[str, tuple[Any, str, Callable[[Path, pytest.MonkeyPatch], Any]]] = {
    "configuration": (location.AutoConfig, "from_pretrained", _configuration),
    "search": (location, "cached_file", _weights),
    "index": (location.json, "loads", _indexed),
    "files of the index": (location, "get_checkpoint_shard_files", _indexed),
    "opening": (files.os, "open", _weights),
    "header": (files.safetensors, "safe_open", _weights),
    "pickle": (files.torch, "load", lambda folder, _: lambda: PickleFile(folder / "weights.bin")),
    "download": (files, "hf_hub_download", _on_another_host),
    "quantization": (location.PreTrainedConfig, "get_config_dict", _quantization),
    "offloading": (store.os, "posix_fallocate", lambda folder, _: lambda: store._file_in(str(folder), 10)),
}  # fmt: skip
"""What is read -> (object, name of its function that a signal interrupts, preparation of the reader)."""


@pytest.mark.parametrize("place", PLACES)
def test_exceptions_of_handlers_pass(
    place: str, raised: type[Exception], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, prepare = PLACES[place]
    read = prepare(folder, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, strike)
        with pytest.raises(raised, match="the alarm rang") as caught:
            read()
    assert type(caught.value) is raised


def test_other_exceptions_become_errors_of_the_checkpoint(
    folder: Path, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise raised("not the alarm")

    monkeypatch.setattr(files.safetensors, "safe_open", fails)
    with pytest.raises(CheckpointError, match=r"damaged, incomplete.*not the alarm"):
        SafetensorsFile(folder / "model.safetensors")
