"""Tests checkpoints of the hub, from a handmade cache and from a server on the loopback interface, without
downloads."""

from __future__ import annotations

import hashlib
import http.server
import json
import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from huggingface_hub import constants

from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.loading import load_skeleton
from parallelformers_ng.checkpoint.location import Location
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError
from tests.zoo.families import CASES

MAKE = next(case for case in CASES if case.name == "llama").make
NAME = "org/tiny"
MARK = 7.0  # value of the last norm in the right checkpoint


def save(directory: Path, mark: float = MARK, **options: Any) -> None:
    """Save a checkpoint whose last norm is `mark`."""
    model = MAKE()
    torch.nn.init.constant_(model.model.norm.weight, mark)
    model.save_pretrained(directory, **options)


def mark_of(location: Location, **options: Any) -> float:
    """Load a checkpoint and return its mark."""
    where = {name: value for name, value in vars(location).items() if value}
    weight = load_skeleton(where.pop("path"), **where, **options).model.norm.weight
    lazy = weight if isinstance(weight, LazyTensor) else weight.data
    return read(lazy.node, {})[0].item()


def snapshot(cache: Path, revision: str) -> Path:
    """Make an empty snapshot in the layout of huggingface_hub's cache."""
    commit = hashlib.sha1(revision.encode()).hexdigest()
    home = cache / "models--org--tiny"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text(commit)
    directory = home / "snapshots" / commit
    directory.mkdir(parents=True)
    return directory


def cached(cache: Path, **options: Any) -> Location:
    return Location(NAME, cache_dir=str(cache), local_files_only=True, **options)


def test_a_model_id_is_found_in_the_cache(tmp_path: Path) -> None:
    save(snapshot(tmp_path, "main"))
    assert mark_of(cached(tmp_path)) == MARK


def test_a_revision_is_another_checkpoint(tmp_path: Path) -> None:
    save(snapshot(tmp_path, "main"), 1.0)
    save(snapshot(tmp_path, "v2"))
    assert mark_of(cached(tmp_path, revision="v2")) == MARK
    assert mark_of(cached(tmp_path)) == 1.0
    with pytest.raises(CheckpointError, match=r"org/tiny/config\.json"):
        mark_of(cached(tmp_path, revision="v3"))


@pytest.mark.parametrize("size", ["5GB", "40KB"], ids=["one file", "several"])
@pytest.mark.parametrize("local", [True, False], ids=["directory", "cache"])
def test_subfolders_and_variants(local: bool, size: str, tmp_path: Path) -> None:
    home = tmp_path / "model" if local else snapshot(tmp_path, "main")
    save(home, 1.0)
    save(home / "inner", 2.0)
    save(home / "inner", variant="fp16", max_shard_size=size)
    where = {"path": str(home)} if local else {"path": NAME, "cache_dir": str(tmp_path), "local_files_only": True}
    assert mark_of(Location(**where, subfolder="inner", variant="fp16")) == MARK
    assert mark_of(Location(**where, subfolder="inner")) == 2.0
    assert mark_of(Location(**where)) == 1.0
    with pytest.raises(CheckpointError, match=r"none of model\.fp16\.safetensors, model\.safetensors\.index\.fp16"):
        mark_of(Location(**where, variant="fp16"))


def test_file_missing_in_cache_is_named_not_fetched(tmp_path: Path) -> None:
    directory = snapshot(tmp_path, "main")
    save(directory, max_shard_size="40KB")
    lost = sorted(directory.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        mark_of(cached(tmp_path))


# -- over HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    """Serve a hub with one gated model; yield its list of requests (path, authorization)."""
    files = tmp_path / "served"
    save(files)
    requests: list[tuple[str, str | None]] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            requests.append((self.path, self.headers.get("Authorization")))
            name = self.path.rpartition("/")[2]
            known = self.path.startswith(f"/{NAME}/resolve/main/") and (files / name).is_file()
            allowed = requests[-1][1] == "Bearer secret"
            data = (files / name).read_bytes() if known and allowed else b""
            self.send_response(200 if known and allowed else 404 if allowed else 401)
            if not allowed:
                self.send_header("X-Error-Code", "GatedRepo")
            elif not known:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_token_opens_a_gated_model_once(hub: list[tuple[str, str | None]], tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    assert mark_of(Location(NAME, token="secret", cache_dir=cache)) == MARK
    assert {header for _, header in hub} == {"Bearer secret"}
    assert sum(path.endswith("model.safetensors") for path, _ in hub) <= 2, "one HEAD and one GET at most"
    del hub[:]
    assert mark_of(Location(NAME, cache_dir=cache, local_files_only=True)) == MARK
    assert not hub, "local_files_only sends no request"


def test_a_gated_model_without_a_token_is_refused(hub: list[tuple[str, str | None]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=NAME):
        mark_of(Location(NAME, token=False, cache_dir=str(tmp_path / "cache")))
    assert {header for _, header in hub} == {None}


# -- what comes with a checkpoint ----------------------------------------------------------------------------------

REMOTE = """
from pathlib import Path
from transformers import LlamaForCausalLM
Path({marker!r}).write_text("ran")
class OwnForCausalLM(LlamaForCausalLM):
    pass
"""


def test_code_of_a_checkpoint_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    save(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "modeling_own.py").write_text(REMOTE.format(marker=str(marker)))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    location = Location(str(tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match="trust_remote_code=True"):
        load_skeleton(location.path)
    assert not marker.exists()
    assert mark_of(location, trust_remote_code=True) == MARK
    assert marker.exists()


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def test_bin_file_with_code_is_refused_unexecuted(tmp_path: Path) -> None:
    MAKE().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    torch.save({"weight": torch.ones(2), "bad": Payload(str(tmp_path / "ran"))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged or contains more than weights"):
        load_skeleton(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(str(tmp_path / "ran"))))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_skeleton(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_quantized_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = {"quant_method": "quanto", "weights": "int8"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    with pytest.raises(UnsupportedModelError, match="quantized by quanto, which is not supported"):
        load_skeleton(str(tmp_path))


def test_missing_and_unexpected_keys_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = MAKE()
    state = model.state_dict()
    model.config.save_pretrained(tmp_path)
    state["model.extra.weight"] = state.pop("model.norm.weight").clone()
    torch.save(state, tmp_path / "pytorch_model.bin")

    def report() -> set[str]:
        messages = {record.getMessage() for record in caplog.records}
        caplog.clear()
        return {message for message in messages if "LOAD REPORT" in message}

    type(model).from_pretrained(tmp_path)
    (want,) = report()
    load_skeleton(str(tmp_path), model_class=type(model))
    assert report() == {want}
    assert "model.norm.weight" in want
    assert "model.extra.weight" in want


def test_an_automatic_dtype_is_that_of_the_checkpoint(tmp_path: Path, groups) -> None:
    from parallelformers_ng import parallelize

    MAKE().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_skeleton(str(tmp_path)).dtype == torch.bfloat16
    with parallelize(tmp_path, workers=groups(2), dtype="auto") as model:
        assert model.dtype == torch.bfloat16
    assert isinstance(model, tf.LlamaForCausalLM)
