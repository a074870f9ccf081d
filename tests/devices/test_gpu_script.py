"""Tests `benchmarks/gpu.sh` with stand-ins for the programs it runs, and its measurements on CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.pretend_cuda import guard

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def run(folder: Path, stand_in: str, part: str = "core", **environment: str) -> tuple[int, str]:
    """Return the script's exit status and the report of a part; the stand-in, a shell line, replaces every program."""
    for name in ("nvidia-smi", "python"):
        program = folder / name
        program.write_text(f"#!/bin/sh\n{stand_in}\n")
        program.chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python"), "PART": part}
    report = folder / f"report-{part}.txt"
    report.with_suffix(".json").write_text("figures of another card")
    done = subprocess.run(
        ["bash", str(SCRIPT), str(folder / "report.txt")],
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
    )
    assert report.read_text() == done.stdout
    assert report.with_suffix(".json").exists() == (part == "policies")  # which goes on with them
    return done.returncode, done.stdout


STEPS = ("wheels", "versions", "tests", "measurements")


@pytest.mark.parametrize(
    "failing",
    [
        "",
        "-m pytest",
        "gpu_all --set core --large 8B --small 8B-8-layers",
        "nvidia-smi",
        "import torch",
        "-m pip",
    ],
)
def test_the_status_tells_the_truth(failing: str, tmp_path: Path) -> None:
    stand_in = f'case "$0 $*" in *"{failing or "nothing"}"*) exit 3;; esac\necho "$*"'
    status, report = run(tmp_path, stand_in, WHEELS=str(tmp_path))
    assert (status != 0) == bool(failing)
    assert ("failed with status 3" in report) == bool(failing)
    begun = STEPS[:2] if failing == "import torch" else STEPS  # without a device nothing else can run
    assert [name for name in STEPS if f"== {name}\n" in report] == [*begun]


def test_hanging_step_leaves_the_others_their_report(tmp_path: Path) -> None:
    """All steps share one time limit. The script does not start steps after the limit, and names them."""
    status, report = run(tmp_path, 'case "$*" in *pytest*) exec sleep 60;; esac', SECONDS_OF_PART="2")
    assert status != 0
    assert "== tests: ended after its" in report
    assert "== measurements: not begun, the time is up" in report


@pytest.mark.parametrize(
    ("part", "command"),
    [
        ("ranks", "-m pytest -q -rs --durations=10 -m gpu tests/devices/one_card"),
        ("policies", "-m benchmarks.gpu_policies --seconds"),
        ("lowbit", "-m benchmarks.gpu_all --set lowbit --large 8B"),
        ("crowd", "-m benchmarks.gpu_all --set crowd --large 8B"),
        ("alone", "-m benchmarks.gpu_all --set alone --large 8B"),
    ],
)
def test_each_part_has_its_command_and_report(part: str, command: str, tmp_path: Path) -> None:
    status, report = run(tmp_path, 'echo "$*"', part)
    assert status == 0
    assert f"\n{command}" in report


def test_unknown_part_is_refused_without_a_device() -> None:
    words = ["make", "--old-file=setup", "gpu", f"PY={sys.executable}", "PART=core families"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "there is no part 'families'; PART takes core, ranks, policies, lowbit, crowd, alone" in done.stderr


def test_without_a_name_two_parts_run(tmp_path: Path) -> None:
    """The second part runs although the first one fails, and each has a report."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\ncase "$*" in *gpu_all*) exit 3;; esac\n')
    program.chmod(0o755)
    (tmp_path / "nvidia-smi").symlink_to(program)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(program)}
    done = subprocess.run(["bash", str(SCRIPT), str(tmp_path / "gpu.txt")], env=environment, capture_output=True)
    assert done.returncode != 0
    assert "failed with status 3" in (tmp_path / "gpu-core.txt").read_text()
    assert "status 0" in (tmp_path / "gpu-ranks.txt").read_text()


EAGER = ["transformers, eager", "parallelformers_ng, eager"]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that runs the benchmark on the host with few tokens and returns the file of figures."""
    for name, value in (("PROMPT", 8), ("TOKENS", 3), ("ROUNDS", 1)):
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)

    def measure(what: str, contestants: list[str] = EAGER, seconds: float = 190.0) -> Path:
        results = tmp_path / "gpu.json"
        arguments = [what, "--shape", "tiny", "--device", "cpu", "--batches", "1", "2", "--json", str(results)]
        monkeypatch.setattr(sys, "argv", ["gpu", *arguments, "--seconds", str(seconds), "--contestants", *contestants])
        gpu.main()
        return results

    return measure


@pytest.mark.parametrize("what", [pytest.param("speed", marks=pytest.mark.slow), "restart"])
def test_each_benchmark_writes_its_figures(what: str, measured: Callable[..., Path]) -> None:
    contestants, results = EAGER, measured(what)
    figures, page = json.loads(results.read_text())["tiny"], results.with_suffix(".md").read_text()
    assert all(f"| {name} |" in page for name in figures)
    if what == "restart":
        assert figures["restart"]["the same tokens"] == 1.0
        return
    each = {f"{name}, batch {n}" for name in contestants for n in (1, 2)}
    below = figures.pop("tokens below the best, standard deviations")
    assert set(figures) == {"copy bandwidth, GB/s"} | each
    assert below == dict.fromkeys(each, 0.0)


def _quick(shape: str, device: str) -> gpu.Contestant:
    return gpu.Contestant(lambda ids, tokens: torch.cat([ids, ids[:, :tokens]], -1), lambda: 0, lambda: None)


def _falls_back(shape: str, device: str) -> gpu.Contestant:
    return gpu.Contestant(gpu.whole(shape, device).generate, lambda: 0, lambda: None, lambda: "not today")


def test_mislabelled_figures_are_reported_as_wrong(
    measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cases are steps that ran without a graph, and tokens that the model did not choose."""
    known = {"falls back": _falls_back, "tokens of its own": _quick}
    monkeypatch.setattr(gpu, "CONTESTANTS", {**gpu.CONTESTANTS, **known})
    with pytest.raises(SystemExit) as wrong:
        measured("speed", [*known])
    said = str(wrong.value.code)
    assert "WRONG: falls back, batch 1: not today" in said
    assert "WRONG: tokens of its own, batch 2: tokens that the model would not choose" in said
    assert "tiny: falls back, batch" not in capsys.readouterr().out


def test_missing_device_fails_captured_steps(measured: Callable[..., Path]) -> None:
    with pytest.raises(
        SystemExit, match="captured steps, batch 1: generate runs without CUDA graphs: there is no CUDA"
    ):
        measured("speed", ["parallelformers_ng, captured steps"])


def test_steps_not_compiled_fail_the_benchmark(measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "compiled_graphs", lambda: 3)  # unchanged by the run
    with pytest.raises(SystemExit, match="compile, batch 1: torch compiled nothing"):
        measured("speed", ["transformers, static + compile"])


def test_restart_with_other_tokens_fails(measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.torch, "equal", lambda *_: False)
    with pytest.raises(SystemExit, match="WRONG: restart: the tokens are others than before"):
        measured("restart")


def test_contestant_without_time_is_named_not_begun(
    measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first contestant takes more than half of the time, so a second one could not finish."""

    def slow(shape: str, device: str) -> gpu.Contestant:
        time.sleep(1.0)
        return gpu.whole(shape, device)

    monkeypatch.setattr(gpu, "CONTESTANTS", {"slow": slow, "late": slow})
    figures = json.loads(measured("speed", ["slow", "late"], seconds=1.5).read_text())["tiny"]
    assert "not begun, for lack of time: late" in capsys.readouterr().out
    assert not any(name.startswith("late") for name in figures)


LISTED = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'"


@pytest.mark.parametrize(
    ("listed", "fails"), [(LISTED, True), ("echo 'No devices were found'", False), ("exit 9", False)]
)
def test_device_unusable_by_torch_is_a_failure(listed: str, fails: bool, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{listed}\n")
    program.chmod(0o755)
    words = ["make", "--old-file=setup", "gpu", f"PY={sys.executable}", f"GPU_ARGS={tmp_path}/gpu.txt"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SECONDS_OF_PART": "60"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    said = "torch can use no CUDA device" if fails else "sees no CUDA device; nothing to check"
    assert said in done.stdout


@pytest.mark.skipif(guard.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("part", "due"),
    [
        (
            "core",
            {
                "transformers, eager, batch 1",
                "gate, 1 rows",
                "attention, 2 rows, 8 keys",
                "2 callers",
                "restart",
                "restart of 2 ranks",
            },
        ),
        ("lowbit", {"parallelformers_ng, captured steps, int4, batch 8", "step without, int4, 2 rows, 8 tokens"}),
        ("crowd", {"2 callers", "transformers, eager, batch 8"}),
        ("alone", {"one rank of 8, int8, 2 rows, 8 tokens", "kernels of one rank of 8"}),
        ("ranks", set()),
    ],
)
def test_part_on_a_pretended_device(part: str, due: set[str], tmp_path: Path) -> None:
    """Packages that a GPU image lacks cannot be imported in this run."""
    environment = os.environ | {"PYTHON": sys.executable, "PRETEND": "1", "PART": part}
    report = tmp_path / "gpu.txt"
    done = subprocess.run(["bash", str(SCRIPT), str(report)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    if due:
        assert due <= set(json.loads((tmp_path / f"gpu-{part}.json").read_text())["tiny"])


@pytest.mark.skipif(guard.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_measurements_outside_of_parts(tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    words = ["-m", "tests.pretend_cuda.image", "-m", "benchmarks.gpu_all", "profile", "speed of others", "sums"]
    sizes = ["--large", "tiny", "--small", "tiny", "--json", str(results)]
    done = subprocess.run([sys.executable, *words, *sizes], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(results.read_text())["tiny"]
    assert {"transformers, static + compile, batch 1", "profile", "sum of 64 bytes"} <= set(figures)
