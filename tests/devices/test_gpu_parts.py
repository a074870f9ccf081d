"""Tests `benchmarks/gpu_parts.py`: its kernels in Triton's interpreter, its models on CPU ranks, its sums on pretended
devices."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts
from parallelformers_ng.runtime.group import WorkerGroup
from tests.kernels.triton.interpreter import interpret

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that measures one part with small sizes and returns the figures."""
    small = {"ROWS": (1, 2), "CONTEXTS": (5,), "CALLERS": (1, 2), "PROMPT": 5, "TOKENS": 6, "MIN_BYTES": 0}
    for name, value in (small | {"WEIGHTS": ("bf16", "int8"), "SUM_BYTES": (64,)}).items():
        monkeypatch.setattr(gpu_parts, name, value)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)

    def measure(what: str, seconds: float = 600.0) -> dict[str, Any]:
        results = tmp_path / "gpu.json"
        words = [what, "--shape", "tiny", "--device", "cpu", "--seconds", str(seconds), "--json", str(results)]
        monkeypatch.setattr(sys, "argv", ["gpu_parts", *words])
        gpu_parts.main()
        figures = json.loads(results.read_text())["tiny"]
        page = results.with_suffix(".md").read_text()
        assert all(f"| {name} |" in page for name in figures)
        return figures

    return measure


def test_each_kernel_is_measured(measured: Callable[..., dict[str, Any]]) -> None:
    interpret()
    figures = measured("kernels")
    figures.pop("copy bandwidth, GB/s")
    products = [f"{kind} product {what}" for kind in ("int8", "fp8", "int4") for what in ("up", "down")]
    readers = ["residual and norm", "gate", "rotary and write"]
    names = [*readers, *(f"{name} of 4 splits" for name in [*readers, "sum"]), *products]
    due = {f"{name}, {rows} rows" for name in names for rows in (1, 2)}
    assert set(figures) == due | {f"attention, {rows} rows, 5 keys" for rows in (1, 2)}
    assert all(set(each) == {"kernel, µs", "twin, µs", "share of the copy bandwidth", "difference"}
               for each in figures.values())  # fmt: skip


def test_wrong_kernel_fails_and_others_run(
    measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def case(name: str, factor: float) -> gpu_parts.Case:
        return gpu_parts.Case(name, 8, lambda: (torch.ones(2),), lambda x: x * factor, lambda x: x)

    monkeypatch.setattr(gpu_parts, "cases", lambda *_: iter([case("wrong", 1.1), case("right", 1.0)]))
    with pytest.raises(SystemExit) as wrong:
        measured("kernels")
    assert wrong.value.code == "WRONG: wrong: ValueError: the kernel differs from its twin by 0.1"
    assert "tiny: right: {" in capsys.readouterr().out


def test_steps_are_measured(measured: Callable[..., dict[str, Any]]) -> None:
    assert set(measured("steps")) == {
        f"step {name}, {weights}, {rows} rows, 5 tokens"
        for name in ("with kernels", "without")
        for weights in ("bf16", "int8")
        for rows in (1, 2)
    }


@pytest.mark.parametrize(("are_due", "said"), [(True, "without kernels"), (False, "with kernels")])
def test_steps_computed_otherwise_fail(are_due: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(call=lambda method: not are_due)
    deployment = SimpleNamespace(replicas=[SimpleNamespace(group=group)])
    monkeypatch.setattr(gpu_parts, "deployment_of", lambda model: deployment)
    with pytest.raises(ValueError, match=f"computed {said}"):
        gpu_parts.check_kernels(None, are_due)


def test_profile_lists_operators_of_steps(
    measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured("profile")["profile"]["steps"] == 5
    table = capsys.readouterr().out
    assert "aten::cos" in table  # of the positions; among the 30 longest on any machine
    assert "Self CPU time total" in table


def test_callers_are_measured(measured: Callable[..., dict[str, Any]]) -> None:
    assert all(each["tokens/s"] > 0 for each in measured("callers").values())


def test_measurement_without_time_is_named(
    measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError):  # no figure, and no complaint
        measured("callers", seconds=-1.0)
    assert "not begun, for lack of time: 2 callers" in capsys.readouterr().out


def test_one_device_has_no_sums(
    measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(FileNotFoundError):
        measured("sums")
    assert "not measured, there is one device" in capsys.readouterr().out


def test_sums_of_two_devices(
    measured: Callable[..., dict[str, Any]], pretended: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "SUM_RANK", "tests.pretend_cuda.gpu_ranks:PretendedSumRank")
    assert measured("sums") == {"sum of 64 bytes": {"NCCL, µs": 0.0, "kernel, µs": pytest.approx(2000)}}


def run_alone(*words: str) -> str:
    command = [sys.executable, "-m", "tests.helpers.small_rank_alone", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_one_rank_of_each_number_is_measured(tmp_path: Path) -> None:
    run_alone("measure", str(tmp_path / "gpu.json"))
    figures = json.loads((tmp_path / "gpu.json").read_text())["tiny"]
    for ranks in (1, 2, 4, 8):
        for weights in ("bf16", "int8"):
            for rows in (1, 2):
                each = figures[f"one rank of {ranks}, {weights}, {rows} rows, 5 tokens"]
                assert each["steps/s"] > 0
                assert (each["× one rank of 1"] == 1) == (ranks == 1)
        assert figures[f"kernels of one rank of {ranks}"]["kernels a step"] == 0  # a CPU has none


def test_a_rank_alone_holds_its_part() -> None:
    rank_part, whole = json.loads(run_alone("shapes").splitlines()[-1]), gpu.SHAPES["tiny"]
    assert rank_part["q"] == [whole["hidden_size"] // 2, whole["hidden_size"]]
    assert rank_part["down"] == [whole["hidden_size"], whole["intermediate_size"] // 2]
    assert rank_part["said"] == rank_part["held"]
