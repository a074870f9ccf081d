"""Tests `fit={"max_memory": …}`: layers that do not fit on their device are in RAM or on disk, and are loaded before
they run."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.control_groups import memory_limit
from parallelformers_ng import (
    ParallelError,
    UnsupportedPlatformError,
    WorkerDiedError,
    parallelize,
    plan,
    save_sharded,
    start_group,
)
from parallelformers_ng.checkpoint import mapping
from parallelformers_ng.collectives import arena
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.offload.budgets import budget_of
from parallelformers_ng.options import FitOptions
from parallelformers_ng.sharding.plan import ShardPlan
from tests.zoo.build import build, largest_difference
from tests.zoo.case import seq2seq_inputs, text_inputs, token_ids
from tests.zoo.decoders import EXPERTS, decoder
from tests.zoo.seq2seq import t5

HOW: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
LAYERS = 9


def llama() -> Any:
    return decoder("Llama", layers=LAYERS)


def a_third(model: Any, ranks: int, cpu: int | str = 0, **options: Any) -> dict[str, Any]:
    """Return a `fit` with room for a third of each rank's weights, and for parameters outside of layers."""
    shard_plan = plan(model, ranks)
    rooms = {rank: size // 3 + 30_000 for rank, size in enumerate(shard_plan.bytes_per_rank)}
    return {"max_memory": {**rooms, "cpu": cpu}, **options}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cpu", [0, 200_000, "1GiB"], ids=["disk", "both", "RAM"])
def test_offloaded_model_equals_the_whole_one(groups: Any, tmp_path: Path, cpu: int | str, ranks: int) -> None:
    whole = llama()
    whole.save_pretrained(tmp_path / "model")
    fit = a_third(whole, ranks, cpu, offload_folder=str(tmp_path / "folder"))
    want, logits = whole.generate(**text_inputs(), **HOW), whole(**text_inputs()).logits
    for source in (llama(), tmp_path / "model"):
        model = parallelize(source, workers=groups(ranks), fit=fit)
        assert torch.equal(model.generate(**text_inputs(), **HOW), want)
        assert largest_difference(model(**text_inputs()).logits, logits) <= 1e-4
        allowed = [size for key, size in fit["max_memory"].items() if key != "cpu"]
        assert all(
            allocated <= room for allocated, room in zip(model.memory_allocated().values(), allowed, strict=True)
        )
        model.save_pretrained(tmp_path / "saved")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        model.deparallelize()
        for name, tensor in whole.state_dict().items():
            assert torch.equal(saved[name], tensor)
            assert torch.equal(model.state_dict()[name], tensor)
    assert not list((tmp_path / "folder").iterdir()), "files in the folder have no names, and end with their processes"


@pytest.mark.parametrize("make", [t5, lambda: decoder("Mixtral", width=80, layers=4, **EXPERTS)], ids=["T5", "Mixtral"])
def test_other_models_from_the_disk(groups: Any, tmp_path: Path, make: Any) -> None:
    inputs = seq2seq_inputs() if make is t5 else text_inputs()
    inputs.pop("decoder_input_ids", None)
    rooms = [size - 20_000 for size in plan(make(), 2).bytes_per_rank]  # room is short by one or two layers
    fit = {"max_memory": {**dict(enumerate(rooms)), "cpu": 0}, "offload_folder": str(tmp_path)}
    shard_plan = plan(make(), 2, fit=fit)
    assert shard_plan.tiers is not None
    assert "disk" in shard_plan.tiers.places[0].values()
    with parallelize(make(), workers=groups(2), fit=fit) as model:
        assert torch.equal(model.generate(**inputs, **HOW), make().generate(**inputs, **HOW))


BOTH = {"strategy": "tensor+pipeline", "tensor": 2}


@pytest.mark.parametrize(
    ("ranks", "layout", "bits"),
    [(2, {"strategy": "pipeline"}, None), (4, BOTH, None), (2, {}, "int8"), (2, {}, "int4"), (4, BOTH, "int8")],
    ids=["stages", "both", "int8", "int4", "both in int8"],
)
def test_in_stages_and_in_few_bits(
    groups: Any, tmp_path: Path, ranks: int, layout: dict[str, Any], bits: str | None
) -> None:
    with parallelize(llama(), workers=groups(2), quantize=bits) as model:
        want, logits = model.generate(**text_inputs(), **HOW), model(**text_inputs()).logits
        save_sharded(model, tmp_path / "cut")
    llama().save_pretrained(tmp_path / "whole")
    half = plan(llama(), ranks, fit=layout, quantize=bits).bytes_per_rank
    rooms = {rank: size // 2 + 30_000 for rank, size in enumerate(half)}
    fit = {**layout, "max_memory": {**rooms, "cpu": 20_000}, "offload_folder": str(tmp_path / "folder")}
    for source, to in ((llama(), bits), (tmp_path / "whole", bits), (tmp_path / "cut", None)):
        with parallelize(source, workers=groups(ranks), fit=fit, quantize=to) as model:
            tiers = deployment_of(model).plan.tiers
            assert tiers is not None
            assert any("disk" in places.values() for places in tiers.places)
            assert torch.equal(model.generate(**text_inputs(), **HOW), want)
            assert largest_difference(model(**text_inputs()).logits, logits) <= 1e-4
            for allocated, room in zip(model.memory_allocated().values(), rooms.values(), strict=True):
                assert allocated <= room


def test_at_most_two_layers_are_in_memory(groups: Any, tmp_path: Path) -> None:
    config = llama().config
    config.hidden_size, config.intermediate_size = 256, 1024
    fit = a_third(build(LlamaForCausalLM, config), 2, offload_folder=str(tmp_path))
    shard_plan = plan(build(LlamaForCausalLM, config), 2, fit=fit)
    resident: list[int] = []
    folder = str(tmp_path)

    def resident_now() -> int:
        """Return the bytes of memory at the addresses of the mapped file, private copies included."""
        files = [file for file in mapping._FILES.values() if folder in os.readlink(f"/proc/self/fd/{file.descriptor}")]
        size, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first = line.split()[0]
            if "-" in first:
                start = int(first.partition("-")[0], 16)
                ours = any(file.start <= start < file.start + file.size for file in files)
            size += int(line.split()[1]) * 1024 if ours and first == "Rss:" else 0
        return size

    def note(*_: Any) -> None:
        """Record the resident bytes once two readings agree, since layers may move while the table is read."""
        before, now = -1, resident_now()
        while before != now:
            before, now = now, resident_now()
        resident.append(now)

    with parallelize(build(LlamaForCausalLM, config), workers=groups(2), fit=fit) as model:
        for layer in (*model.model.layers, model.model.norm):
            layer.register_forward_hook(note)
        model.generate(**text_inputs(), **HOW)
    assert shard_plan.tiers is not None
    moved = dict(shard_plan.tiers.moved(0))
    layer = shard_plan.bytes_moved(0) // len(moved)
    assert len(moved) > 4
    assert max(resident) >= layer
    neighbours = 2 * len(moved) * (64 << 10)  # pages that the system maps beside each end of a layer
    assert max(resident) <= 2 * layer + neighbours < 3 * layer


def test_a_killed_worker_comes_back_with_its_files(tmp_path: Path) -> None:
    want = llama().generate(**text_inputs(), **HOW)
    fit = a_third(llama(), 2, offload_folder=str(tmp_path))
    with parallelize(llama(), 2, workers={"device": "cpu"}, fit=fit) as model:
        os.kill(deployment_of(model).pids[1], signal.SIGKILL)
        try:
            got = model.generate(**text_inputs(), **HOW)
        except WorkerDiedError:
            got = model.generate(**text_inputs(), **HOW)
        assert torch.equal(got, want)
        assert torch.equal(model.lm_head.weight.sum(), llama().lm_head.weight.sum())


def test_table_shows_tiers_beforehand(tmp_path: Path) -> None:
    shard_plan: ShardPlan = plan(llama(), 2, fit=a_third(llama(), 2, 100_000, offload_folder=str(tmp_path)))
    for rank in range(2):
        parts = [shard_plan.bytes_in(place, rank) for place in ("device", "cpu", "disk")]
        assert sum(parts) == shard_plan.bytes_per_rank[rank]
        assert 0 < parts[1] <= 50_000
        assert shard_plan.bytes_moved(rank) == parts[2]
    assert "on disk" in str(shard_plan)
    assert "moved for each token" in str(shard_plan)
    assert plan(llama(), 2, fit={"max_memory": {0: "1GiB", 1: "1GB"}}).tiers is None


@pytest.mark.parametrize(
    ("fit", "why"),
    [
        (
            {"max_memory": {0: 90_000, 1: 1000}},
            r"max_memory of device 1 is 1.00 kB; rank 1 of LlamaForCausalLM has .* give",
        ),
        ({"max_memory": {0: 9, 1: 9, 7: 9}}, "max_memory has an unknown device 7; known devices: 0, 1, 'cpu'"),
        ({"max_memory": {0: 9, "cpu": 9}}, "has no size for device 1"),
        ({"max_memory": {0: "9 apples", 1: 9}}, r"max_memory\[0\] is '9 apples'; it takes bytes, or a text like '5GB'"),
        ({"max_memory": {0: 150_000, 1: 150_000, "cpu": 0}}, "give an offload_folder for the overflow"),
        (
            {"max_memory": {0: 9, 1: 9}, "offload_folder": "/proc/1/no"},
            "offload_folder /proc/1/no cannot be written to",
        ),
        ({"offload_folder": "/tmp"}, "give max_memory as well"),
    ],
)
def test_wrong_budgets_are_refused(fit: dict[str, Any], why: str) -> None:
    with pytest.raises(ParallelError, match=why):
        plan(llama(), 2, fit=fit)


@pytest.mark.parametrize(
    ("ids", "replicas", "sizes", "rooms"),
    [
        (None, 2, [50, 60, 40, 70], [("device 2", 40), ("device 1", 60)]),
        ([4, 5, 6, 7], 2, [50, 60, 40, 70], [("device 6", 40), ("device 5", 60)]),
        ([1, 1], 1, [50], [("device 1, for each of its 2 ranks,", 25)] * 2),
    ],
)
def test_replicas_use_their_smallest_device(
    ids: list[int] | None, replicas: int, sizes: list[int], rooms: list[tuple[str, int]]
) -> None:
    keys = sorted(set(ids)) if ids else range(len(sizes))
    options = FitOptions(max_memory={**dict(zip(keys, sizes, strict=True)), "cpu": 100})
    budget = budget_of(options, 2, "cuda", ids, replicas)
    assert budget is not None
    assert budget.devices == rooms
    assert budget.cpu == 100 // replicas
    on_cpu = budget_of(FitOptions(max_memory={0: 50, 1: 60, "cpu": 100}), 2, "cpu", None, replicas)
    assert on_cpu is not None
    assert (on_cpu.devices, on_cpu.cpu) == ([("device 0", 50), ("device 1", 60)], 100)


def test_plan_needs_no_report_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test pretends that the system is not Linux."""

    def missing(path: str) -> NoReturn:
        raise FileNotFoundError(path)

    monkeypatch.setattr(arena, "open", missing, raising=False)
    rooms = {0: "1GiB", 1: "1GiB"}
    with pytest.raises(UnsupportedPlatformError, match=r"fit: /proc/meminfo .* if max_memory has a size for 'cpu'"):
        plan(llama(), 2, fit={"max_memory": rooms})
    assert plan(llama(), 2, fit={"max_memory": {**rooms, "cpu": "1GiB"}}).tiers is None


def test_a_full_folder(groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, size)

    group = groups(2)
    monkeypatch.setattr(os, "posix_fallocate", full)
    model, fit = llama(), a_third(llama(), 2, offload_folder=str(tmp_path))
    want = model.generate(**text_inputs(), **HOW)
    with pytest.raises(
        ParallelError, match=f"offload_folder {tmp_path} has .*No space left on device; the model is unchanged"
    ):
        parallelize(model, workers=group, fit=fit)
    assert torch.equal(model.generate(**text_inputs(), **HOW), want)


@pytest.mark.parametrize("cpu", [0, 30_000, "1GB"], ids=["disk", "both", "RAM"])
def test_on_pretended_devices(pretended_groups: Any, tmp_path: Path, cpu: int | str) -> None:
    fit = a_third(decoder("Llama", layers=4), 2, cpu, offload_folder=str(tmp_path))
    with parallelize(decoder("Llama", layers=4), workers=pretended_groups(2), fit=fit) as model:
        want = decoder("Llama", layers=4).generate(**text_inputs(), **HOW)
        assert torch.equal(model.generate(**text_inputs(), **HOW), want)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [0, "1GiB"], ids=["disk", "RAM"])
def test_in_a_control_group_of_memory(tmp_path: Path, cpu: int | str) -> None:
    """The weights take three times the room. The limit is the memory of idle ranks, the room, one layer, and data that
    is not weights."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=18, num_attention_heads=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    whole = build(LlamaForCausalLM, config)
    whole.save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    prompt = token_ids(1, 6)
    want = whole.generate(prompt, **HOW)
    shard_plan = plan(whole, 2)
    room = shard_plan.bytes_per_rank[0] // 3
    layer = shard_plan.bytes_per_rank[0] // 18
    others = 16 << 20
    group = start_group(2, device="cpu", timeout=60)
    with (
        memory_limit(group.pids[0], room + layer + others) as one,
        memory_limit(group.pids[1], room + layer + others) as two,
    ):
        if not (one and two):
            group.close()
            pytest.skip("needs permission to make control groups")
        fit = {"max_memory": {0: room, 1: room, "cpu": cpu}, "offload_folder": str(tmp_path / "folder")}
        try:
            model = parallelize(tmp_path / "model", workers=group, fit=fit)
            assert torch.equal(model.generate(prompt, **HOW), want)
        finally:
            group.close()
