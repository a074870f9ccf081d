"""Tests that checkpoints are read slice by slice with the same results as `from_pretrained`."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from parallelformers_ng import parallelize
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.checkpoint.files import CheckpointFile, FileLeaf, SafetensorsFile
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.loading import Checkpoint, load_skeleton
from parallelformers_ng.checkpoint.mapping import file_at
from parallelformers_ng.checkpoint.reading import read, read_shard
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.tensor_plan import Shard
from parallelformers_ng.sharding.tensors import get_tensor
from tests.helpers.patience import await_incarnation
from tests.zoo.build import largest_difference
from tests.zoo.families import CASES

BY_NAME = {case.name: case for case in CASES}
NAMES = ("llama", "gpt2", "t5", "bert", "mixtral")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save one checkpoint of each family; return their directories by name."""
    directories = {}
    for name in NAMES:
        directories[name] = tmp_path_factory.mktemp(name)
        BY_NAME[name].make().save_pretrained(directories[name])
    return directories


def whole_model(name: str, directory: Path, **options: Any) -> Any:
    return type(BY_NAME[name].make()).from_pretrained(directory, **options)


def check_shards(model: Any, want: Any, world_size: int) -> Checkpoint:
    """Assert that every rank's part of every tensor equals the slice of the whole model, bit for bit."""
    plan = build_plan(model, world_size, select(model))
    checkpoint = pickle.loads(pickle.dumps(Checkpoint.take(model, plan)))
    for name, tensor in plan.tensors.items():
        whole = get_tensor(want, name, tensor.is_buffer).detach()
        assert tensor.dtype == whole.dtype
        for rank, shard in enumerate(tensor.shards):
            node = checkpoint.nodes.get(name)
            own = get_tensor(model, name, tensor.is_buffer).detach()
            part = shard.of(own) if node is None else read_shard(node, shard, rank)
            assert torch.equal(part, shard.of(whole)), (name, rank)
            assert node is None or part.is_contiguous()
    return checkpoint


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_read_exactly_their_slices(name: str, world_size: int, saved: dict[str, Path]) -> None:
    model = load_skeleton(str(saved[name]))
    want = whole_model(name, saved[name])
    assert type(model) is type(want)
    assert model.state_dict().keys() == want.state_dict().keys()
    check_shards(model, want, world_size)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_cast_as_from_pretrained_does(name: str, saved: dict[str, Path]) -> None:
    model = load_skeleton(str(saved[name]), dtype=torch.bfloat16)
    check_shards(model, whole_model(name, saved[name], dtype=torch.bfloat16), 2)


@pytest.mark.parametrize("name", NAMES)
def test_bin_files_are_read(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    want = whole_model(name, saved[name])
    want.config.save_pretrained(tmp_path)
    torch.save(want.state_dict(), tmp_path / "pytorch_model.bin")
    check_shards(load_skeleton(str(tmp_path)), want, 2)


def test_many_files_with_an_index_are_read(saved: dict[str, Path], tmp_path: Path) -> None:
    want = whole_model("mixtral", saved["mixtral"])
    want.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_shards(load_skeleton(str(tmp_path)), want, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_runs_and_comes_back(name: str, saved: dict[str, Path], groups) -> None:
    want, inputs = whole_model(name, saved[name]), BY_NAME[name].inputs()
    model = parallelize(str(saved[name]), workers=groups(2))
    assert not model.training
    with torch.no_grad():
        assert largest_difference(model(**inputs)[0], want(**inputs)[0]) <= 1e-4
    model.deparallelize()
    state = model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in want.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], want(**inputs)[0])


def test_meta_model_takes_weights_from_a_directory(saved: dict[str, Path], groups) -> None:
    want, inputs = whole_model("llama", saved["llama"]), BY_NAME["llama"].inputs()
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**want.config.to_dict(), "attention_dropout": 0.5}))
    assert parallelize(model, weights=saved["llama"], workers=groups(2)) is model
    with torch.no_grad():
        assert largest_difference(model(**inputs)[0], want(**inputs)[0]) <= 1e-4
    model.deparallelize()


def test_weights_of_another_model_are_refused(saved: dict[str, Path], groups) -> None:
    config = whole_model("llama", saved["llama"]).config
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(config).eval()
        model.model.extra = torch.nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match=r"does not contain model\.extra\.weight, which has shape \[3, 3\]"):
        parallelize(model, weights=saved["llama"], workers=groups(2))


def test_missing_keys_are_drawn_as_from_pretrained_does(saved: dict[str, Path]) -> None:
    """A classifier loads the checkpoint of a base model: one warning appears, and the random head is the same."""
    torch.manual_seed(3)
    want = tf.BertForSequenceClassification.from_pretrained(saved["bert"])
    torch.manual_seed(3)
    model = load_skeleton(str(saved["bert"]), model_class=tf.BertForSequenceClassification)
    assert isinstance(model.classifier.weight, torch.nn.Parameter)
    assert not isinstance(model.classifier.weight, LazyTensor)
    checkpoint = check_shards(model, want, 2)
    assert "classifier.weight" not in checkpoint.nodes


def leaves_in(file: CheckpointFile) -> list[FileLeaf]:
    return [FileLeaf(shape, dtype, file, key) for key, (shape, dtype) in file.entries.items()]


def test_slices_of_first_dimension_view_the_file(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(96.0).view(12, 8)}, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    (leaf,) = leaves_in(file)
    rows = read_shard(leaf, Shard(0, ((3, 6),)))
    columns = read_shard(leaf, Shard(1, ((2, 4),)))
    assert file_at(rows.data_ptr()) is not None
    assert file_at(columns.data_ptr()) is None
    rows.zero_()  # the mapping is private: the file keeps its values
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], torch.arange(96.0).view(12, 8))
    assert torch.equal(columns, torch.arange(96.0).view(12, 8)[:, 2:4])


OPERATIONS = {
    "cat": lambda a, b: torch.cat([a, b], dim=1),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "stack then cat": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "chunk": lambda a, b: a.chunk(3, dim=0)[1],
    "split": lambda a, b: a.split([1, 2, 3], dim=1)[2],
    "slice": lambda a, b: a[1:-1, 2:],
    "step": lambda a, b: a[::2],
    "select": lambda a, b: a[2],
    "transpose": lambda a, b: a.t().contiguous(),
    "permute": lambda a, b: a.view(2, 3, 6).permute(2, 0, 1),
    "interleave": lambda a, b: a.reshape(3, 2, 6).transpose(0, 1).reshape(6, 6),
    "unbind": lambda a, b: a.unbind(1)[4],
    "squeeze": lambda a, b: a[2:3].squeeze(0).unsqueeze(-1),
    "cast": lambda a, b: torch.cat([a, b]).to(torch.bfloat16),
    "arithmetic": lambda a, b: a + 1,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cut_passes_through_operations(name: str, tmp_path: Path) -> None:
    stored = {"a": torch.randn(6, 6), "b": torch.randn(6, 6)}
    save_file(stored, tmp_path / "x.safetensors")
    lazy = {leaf.key: LazyTensor(leaf) for leaf in leaves_in(SafetensorsFile(tmp_path / "x.safetensors"))}
    want = OPERATIONS[name](stored["a"], stored["b"])
    got = OPERATIONS[name](lazy["a"], lazy["b"])
    assert got.shape == want.shape
    assert torch.equal(read(got.node, {}), want)
    for dim, size in enumerate(want.shape):
        for ranges in (((0, size),), ((1, size),), ((0, 1), (size - 1, size)), ((1, 1),)):
            shard = Shard(dim, ranges)
            assert torch.equal(read_shard(got.node, shard), shard.of(want))


def test_a_restarted_group_reads_the_files_again(saved: dict[str, Path], tmp_path: Path) -> None:
    want, inputs = whole_model("llama", saved["llama"]), BY_NAME["llama"].inputs()
    want.save_pretrained(tmp_path)
    model = parallelize(tmp_path, num_gpus=2, workers={"device": "cpu", "timeout": 60})
    expected = model(**inputs)[0]
    (tmp_path / "model.safetensors").unlink()  # the name is gone; the open file remains
    os.kill(deployment_of(model).pids[1], signal.SIGKILL)
    await_incarnation(model, 1)
    assert torch.equal(model(**inputs)[0], expected)
    model.deparallelize()
    state = model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in want.state_dict().items())


def test_a_file_written_to_since_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(4, 4)}, path)
    (leaf,) = leaves_in(SafetensorsFile(path))
    time.sleep(0.02)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    with pytest.raises(CheckpointError, match=rf"{path} has changed since"):
        leaf.tensor()


def test_unloadable_checkpoints_are_refused_by_name(saved: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"/nowhere is no directory"):
        parallelize("/nowhere", 2, workers={"device": "cpu"})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        parallelize(tmp_path, 2, workers={"device": "cpu"})
    config = json.loads((saved["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors"):
        parallelize(tmp_path, 2, workers={"device": "cpu"})
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(UnsupportedModelError, match=r"no model class NoSuchModel"):
        parallelize(tmp_path, 2, workers={"device": "cpu"})


def test_workers_of_a_refused_model_end(tmp_path: Path, saved: dict[str, Path]) -> None:
    """Workers start while the parent plans. If the parent refuses the model, the workers end although they still import
    torch."""
    (tmp_path / "config.json").write_text((saved["llama"] / "config.json").read_text())
    before = resources()
    with pytest.raises(CheckpointError, match="holds none of"):
        parallelize(tmp_path, 2, workers={"device": "cpu"})
    assert resources() == before


def resources() -> tuple[list[str], int]:
    """Return this process's children and its number of descriptors."""
    children = [Path(path, "children").read_text() for path in Path("/proc/self/task").iterdir()]
    return sorted(" ".join(children).split()), len(os.listdir("/proc/self/fd"))
