"""Tests that the library is complete in a clone, for any installed packages, and that a wheel has the policies once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_EDITABLE_INSTALL = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""
USE = """
import logging; logging.basicConfig(level=logging.DEBUG)
if __name__ == "__main__":
    import parallelformers_ng
    from parallelformers_ng.policies import gpt2
    from parallelformers_ng.sharding.policy_registry import written_policies
    from parallelformers_ng.runtime.group import WorkerGroup
    print(parallelformers_ng.__file__, gpt2.__file__, len(written_policies()), sep="\\n")
    with WorkerGroup(1, target="parallelformers_ng.worker.runner:ModelRunner", threads=1) as group:
        print(group.call("caches.held"))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the source, without kernels, and return its folder."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("parallelformers_ng", "policies"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def installed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an installed wheel, built from a copy of the clone without a compiler."""
    source = shutil.copytree(clone, tmp_path_factory.mktemp("source") / "copy", symlinks=True)
    wheels = tmp_path_factory.mktemp("wheels")
    command = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", str(wheels), str(source)]
    built = subprocess.run(
        [sys.executable, *command], env={**os.environ, "CC": "false"}, capture_output=True, text=True, timeout=240
    )
    assert built.returncode == 0, built.stderr
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(target)
    return target


def use(folder: Path, *path: Path) -> list[str]:
    """Return the output of a Python started in a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", NO_EDITABLE_INSTALL + USE],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_wheel_has_all_modules_and_policies_once(installed: Path) -> None:
    modules = {path.relative_to(ROOT) for path in (ROOT / "parallelformers_ng").rglob("*.py")}
    assert {module for module in modules if not (installed / module).exists()} == set()
    names = sorted(path.relative_to(installed).parts[0] for path in installed.glob("*/"))
    assert [name for name in names if not name.endswith(".dist-info")] == ["parallelformers_ng"]
    policies = {path.name for path in (installed / "parallelformers_ng" / "policies").glob("*.py")}
    assert policies == {path.name for path in (ROOT / "policies").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in the clone, a wheel installed", "in the clone, nothing installed", "elsewhere"])
def test_from_a_clone_the_library_is_whole(clone: Path, installed: Path, tmp_path: Path, place: str) -> None:
    if place == "elsewhere":  # then the clone is on PYTHONPATH
        package, policy, count, caches = use(tmp_path, clone)
    else:
        package, policy, count, caches = use(clone, *([installed] if "wheel" in place else []))
    assert Path(package) == clone / "parallelformers_ng" / "__init__.py"
    assert Path(policy).resolve() == clone / "policies" / "gpt2.py"
    assert int(count) > 20
    assert caches == "0"


@pytest.mark.slow
def test_installed_wheel_is_complete_elsewhere(installed: Path, tmp_path: Path) -> None:
    package, policy, *_ = use(tmp_path, installed)
    assert Path(package) == installed / "parallelformers_ng" / "__init__.py"
    assert Path(policy) == installed / "parallelformers_ng" / "policies" / "gpt2.py"


@pytest.fixture(scope="module")
def with_kernels(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which pip has installed a wheel built with a compiler."""
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    source = shutil.copytree(clone, tmp_path_factory.mktemp("source") / "copy")
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("with_kernels")
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", str(wheels), str(source)], check=True
    )
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), wheel], check=True)
    return target


@pytest.mark.slow
def test_a_wheel_has_the_kernels_and_they_compute(with_kernels: Path, tmp_path: Path) -> None:
    program = NO_EDITABLE_INSTALL + (
        "import torch\n"
        "from parallelformers_ng.collectives import _kernel\n"
        "from parallelformers_ng.kernels import _decode\n"
        "from parallelformers_ng.live_code import _places\n"
        "from parallelformers_ng.kernels.operators import StreamingLinear\n"
        "from parallelformers_ng.kernels.installation import install\n"
        "layer = torch.nn.Linear(70, 5).requires_grad_(False)\n"
        "x = torch.randn(1, 70)\n"
        "want = layer(x)\n"
        "install(layer)\n"
        "assert type(layer) is StreamingLinear\n"
        "with torch.inference_mode():\n"
        "    torch.testing.assert_close(layer(x), want)\n"
        "print(_kernel.__file__, _decode.__file__, _places.__file__, sep='\\n')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(with_kernels), "PYTHONSAFEPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for path in done.stdout.splitlines():
        assert with_kernels in Path(path).parents, path
