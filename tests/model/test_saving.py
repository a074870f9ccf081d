"""Tests that saved checkpoints load bit for bit, that damage raises an error with the file's name, and that
interruptions are harmless."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from parallelformers_ng import parallelize, save_sharded
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.checkpoint.loading import Checkpoint, load_skeleton
from parallelformers_ng.checkpoint.mapping import file_at
from parallelformers_ng.checkpoint.nodes import leaves, of_ranks
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.checkpoint.reading import read_copy, read_shard
from parallelformers_ng.checkpoint.writing import checksum, replaced_directory, write_safetensors
from parallelformers_ng.cli import commands as cli
from parallelformers_ng.errors import CheckpointError, NotParallelizedError, ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.option_checks import parse_size
from parallelformers_ng.sharding.builder import build_plan
from tests.helpers.damage import DAMAGE, damaged, flip_weight, save_intact
from tests.zoo.families import CASES

BY_NAME = {case.name: case for case in CASES}
NAMES = ("llama", "gpt2", "t5", "bert", "mixtral")


def same_weights(got: Any, want: Any) -> bool:
    state = got.state_dict()
    return state.keys() == want.state_dict().keys() and all(
        torch.equal(tensor, state[key]) for key, tensor in want.state_dict().items()
    )


def load_whole(directory: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Load each rank's shards as workers would, and gather them into whole tensors."""
    model = load_skeleton(str(directory))
    plan = build_plan(model, world_size, select(model))
    checkpoint = Checkpoint.take(model, plan)
    whole = {}
    for name, node in checkpoint.nodes.items():
        shards = plan.tensors[name].shards
        parts = [read_shard(node, shard, rank) for rank, shard in enumerate(shards)]
        whole[name] = read_copy(of_ranks(plan.tensors[name], parts.__getitem__), {})
    return whole


@pytest.mark.parametrize("name", NAMES)
def test_saved_loaded_cut_anew_and_gathered(name: str, tmp_path: Path, groups) -> None:
    """Three ranks save, and three load. Two ranks load, save over the loaded checkpoint, and load again."""
    want, model = BY_NAME[name].make(), BY_NAME[name].make()
    with parallelize(model, workers=groups(3)):
        save_sharded(model, tmp_path, max_shard_size="20KB")
    for world_size in (3, 2, 2):
        loaded = parallelize(tmp_path, workers=groups(world_size))
        save_sharded(loaded, tmp_path)
        loaded.deparallelize()
        assert same_weights(loaded, want)
    assert len(list(tmp_path.glob("rank-*"))) == 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_checkpoint_of_first_version_loads(world_size: int) -> None:
    """`saved/version_1` is a tied Llama on two ranks; checkpoints of users must stay readable."""
    directory = Path(__file__).parent / "saved" / "version_1"
    whole = load_whole(directory, world_size)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        values = ((torch.arange(parameter.numel()) * 7 + number * 13) % 31 - 15) / 16
        assert torch.equal(whole.pop(name), values.view(parameter.shape)), name
    assert whole.keys() == {"lm_head.weight"}


def test_a_rank_reads_no_other_ranks_file(tmp_path: Path, groups) -> None:
    with parallelize(BY_NAME["llama"].make(), workers=groups(2)) as model:
        save_sharded(model, tmp_path)
    model = load_skeleton(str(tmp_path))
    plan = build_plan(model, 2, select(model))
    checkpoint = Checkpoint.take(model, plan)
    files = {leaf.file for node in checkpoint.nodes.values() for leaf in leaves(node)}
    (other,) = (file for file in files if "rank-00001" in file.path)
    other.tensor = None  # type: ignore[assignment, method-assign]
    for name, node in checkpoint.nodes.items():
        part = read_shard(node, plan.tensors[name].shards[0], 0)
        assert plan.tensors[name].shards[0].zero or file_at(part.data_ptr()) is not None, name


@pytest.mark.parametrize("name", NAMES)
def test_save_pretrained_writes_an_ordinary_checkpoint(name: str, tmp_path: Path, groups) -> None:
    """Names and values equal those of the whole model, for sources in memory and in files."""
    want = BY_NAME[name].make()
    want.save_pretrained(tmp_path / "whole")
    ordinary = load_file(tmp_path / "whole" / "model.safetensors")
    for source in (BY_NAME[name].make(), tmp_path / "whole"):
        with parallelize(source, workers=groups(2)) as model:
            model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
            index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == ordinary.keys()
            assert same_weights(type(want).from_pretrained(tmp_path / "saved"), want)
            model.save_pretrained(tmp_path / "saved")
        got = load_file(tmp_path / "saved" / "model.safetensors")
        assert got.keys() == ordinary.keys()
        assert all(torch.equal(got[key], ordinary[key]) for key in ordinary)
        assert {file.suffix for file in (tmp_path / "saved").iterdir()} == {".json", ".safetensors"}
        assert not list((tmp_path / "saved").glob("*index*"))


def test_arguments_that_cannot_be_served_are_refused(tmp_path: Path, groups) -> None:
    model = BY_NAME["llama"].make()
    with pytest.raises(NotParallelizedError):
        save_sharded(model, tmp_path)
    with parallelize(model, workers=groups(2)):
        with pytest.raises(ParallelError, match=r"save_pretrained\(push_to_hub=…\)"):
            model.save_pretrained(tmp_path, push_to_hub=True)
        with pytest.raises(CheckpointError, match="max_shard_size is '5 apples'"):
            save_sharded(model, tmp_path / "x", max_shard_size="5 apples")
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(CheckpointError, match="is no sharded checkpoint"):
            save_sharded(model, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_is_cut_from_the_shell(world_size: int, tmp_path: Path) -> None:
    want = BY_NAME["mixtral"].make()
    want.save_pretrained(tmp_path / "whole")
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    assert cli.main(["shard", whole, cut, "--num-gpus", str(world_size), "--max-shard-size", "30KB"]) == 0
    assert cli.main(["shard", whole, whole]) == 2, "a checkpoint of another kind is not replaced"
    state = want.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_whole(tmp_path / "cut", 2).items())


def test_weights_are_gathered_from_ranks_without_host_copy(tmp_path: Path, groups) -> None:
    want, model = BY_NAME["t5"].make(), BY_NAME["t5"].make()
    parallelize(model, workers=groups(3))
    deployment_of(model)._release_store()  # the state on CUDA without host_copy
    model.save_pretrained(tmp_path)
    assert same_weights(type(want).from_pretrained(tmp_path), want)
    model.deparallelize()
    assert same_weights(model, want)


# -- interruptions -------------------------------------------------------------------------------------------------


def test_an_interrupted_save_leaves_the_previous_one(tmp_path: Path, groups, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "saved"
    with parallelize(BY_NAME["llama"].make(), workers=groups(2)) as model:
        save_sharded(model, target)
        (target / "tokenizer.json").write_text("{}")
        (target / "shared_notes.txt").write_text("")
        before = {file.name: file.read_bytes() for file in target.iterdir()}

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("parallelformers_ng.model.saving.write_index", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save_sharded(model, target)
        assert {file.name: file.read_bytes() for file in target.iterdir()} == before
        save_sharded(model, target, max_shard_size="20KB")
    assert (target / "tokenizer.json").read_text() == "{}"
    assert (target / "shared_notes.txt").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["saved"], "leftovers"


def test_directory_is_replaced_if_swapping_is_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSwap:
        @staticmethod
        def renameat2(*_: Any) -> int:
            import ctypes
            import errno

            ctypes.set_errno(errno.EINVAL)
            return -1

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").write_text("")
    monkeypatch.setattr("parallelformers_ng.checkpoint.writing.ctypes.CDLL", lambda *_, **__: NoSwap)
    with replaced_directory(tmp_path / "a", lambda _: {"old"}) as partial:
        (partial / "new").write_text("")
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["new"]
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


# -- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_intact(BY_NAME["llama"].make(), tmp_path_factory.mktemp("intact"))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_file_or_harmless(kind: str, intact: dict[str, Path], tmp_path: Path) -> None:
    """The test tries a sample of damages; `python -m benchmarks.loading --only damage` tries two hundred, with
    workers."""
    state = BY_NAME["llama"].make().state_dict()
    for broken in damaged(kind, intact[kind], tmp_path, rounds=4):
        refusal = ""
        try:
            loaded = load_whole(broken.directory, 2)
        except CheckpointError as error:
            refusal = str(error)
        assert not refusal or str(broken.directory) in refusal, f"{broken.name}: {refusal}"
        if not refusal:
            assert broken.damage is not flip_weight
            assert loaded.keys() >= state.keys(), f"{broken.name}: weights were drawn instead"
            assert all(torch.equal(loaded[name], state[name]) for name in state), broken.name
    assert not list(tmp_path.iterdir())


# -- the parts -----------------------------------------------------------------------------------------------------


def test_checksum_detects_flipped_bits_and_swapped_blocks() -> None:
    data = torch.randint(0, 255, ((3 << 20) + 5,), dtype=torch.uint8)
    before = checksum(data)
    for place in (0, 2 << 20, len(data) - 1):
        other = data.clone()
        other[place] ^= 16
        assert checksum(other) != before
    swapped = torch.cat([data[1 << 20 : 2 << 20], data[: 1 << 20], data[2 << 20 :]])
    assert checksum(swapped) != before
    assert checksum(data.clone()) == before


def test_written_file_is_readable_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "byte": torch.arange(5, dtype=torch.uint8), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3),
        "half": torch.randn(3, 5).half(), "turned": torch.randn(4, 6).t(), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    written = write_safetensors(tmp_path / "x.safetensors", entries, tensors.__getitem__)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert written.size == (tmp_path / "x.safetensors").stat().st_size


def test_sizes() -> None:
    assert [parse_size(size) for size in (7, "5GB", "1.5 MB", "2KiB")] == [7, 5 * 10**9, 1_500_000, 2048]
    for wrong in (0, -1, True, "GB", "5", "-1GB"):
        with pytest.raises(CheckpointError, match="max_shard_size"):
            parse_size(wrong)


def test_progress_lines_are_logged_without_a_terminal(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "parallelformers_ng")
    clock = iter([0.0, 1.0, 4.0, 10.0, 11.0, 15.0])
    monkeypatch.setattr("parallelformers_ng.checkpoint.progress.time.monotonic", lambda: next(clock))
    with progress_bar("loading Llama", 10 * 10**9) as advance:
        for _ in range(5):
            advance(10**9)
    assert capfd.readouterr().err == ""
    assert [each.getMessage() for each in caplog.records] == [
        "loading Llama: 3.0 of 10.0 GB, 300 MB/s",
        "loading Llama: 5.0 of 10.0 GB, 400 MB/s",
    ]
    with progress_bar("loading Llama", 10, show=False) as advance:
        advance(10)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_show_bytes_and_rate(tmp_path: Path, groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bars of loading, of both ways of saving and of both ways of gathering reach the end. Without a bar,
    nothing is printed."""
    BY_NAME["llama"].make().save_pretrained(tmp_path / "whole")
    # A model this small ends before the bar would be drawn a second time.
    eager = functools.partial(tqdm, mininterval=0, miniters=1)
    monkeypatch.setattr("parallelformers_ng.checkpoint.progress.tqdm", eager)

    def lived(progress: bool) -> str:
        monkeypatch.setattr("sys.stderr", Terminal())
        model = parallelize(tmp_path / "whole", workers=groups(2), progress=progress)
        model.state_dict()
        save_sharded(model, tmp_path / "cut", progress=progress)
        model.save_pretrained(tmp_path / "saved", progress=progress)
        model.deparallelize()
        return sys.stderr.getvalue()

    shown = lived(progress=True)
    for what in ("loading", "gathering", "saving"):
        seen = [line for line in shown.split("\r") if line.startswith(f"{what} LlamaForCausalLM")]
        assert any("100%" in line and "B/s" in line for line in seen), f"{what}: {seen}"
    assert lived(progress=False) == ""


def test_an_interrupted_save_pretrained_leaves_the_previous_one(
    tmp_path: Path, groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parallelize(BY_NAME["llama"].make(), workers=groups(2)) as model:
        model.save_pretrained(tmp_path, max_shard_size="60KB")
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        files = []

        def full(path: Path, *rest: Any) -> Any:
            files.append(path)
            if len(files) == 3:
                raise OSError(28, "No space left on device")
            return write_safetensors(path, *rest)

        monkeypatch.setattr("parallelformers_ng.checkpoint.save_pretrained.write_safetensors", full)
        with pytest.raises(OSError, match="No space"):
            model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_tied_weights_are_saved_once(tmp_path: Path, groups) -> None:
    model = BY_NAME["t5"].make()
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert len(tied) > len(dict(model.named_parameters()))
    with parallelize(model, workers=groups(2)):
        save_sharded(model, tmp_path / "cut")
        model.save_pretrained(tmp_path / "whole")
    index = json.loads((tmp_path / "cut" / "parallelformers_ng.index.json").read_text())
    names = [name for facts in index["tensors"].values() for name in facts["names"]]
    assert sorted(names) == sorted(set(names))
    assert len(index["tensors"]) < len(names)
    assert len(load_file(tmp_path / "whole" / "model.safetensors")) < len(names)
