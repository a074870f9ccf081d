"""Tests that workflows, hooks, forms and version files are valid, and name existing things."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from benchmarks import zoo_changes

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
SELF_CHECK = ROOT / "tests" / "kernels" / "self_check" / "run.sh"
SCHEMAS = {
    "github-workflows": sorted(GITHUB.glob("workflows/*.yml")),
    "github-issue-forms": sorted(set(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}),
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_workflows_and_forms_are_valid(schema: str) -> None:
    assert SCHEMAS[schema]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", SCHEMAS["github-workflows"], ids=lambda path: path.stem)
def test_workflows_run_existing_commands(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [step["run"] for job in _yaml(workflow)["jobs"].values() for step in job["steps"] if "run" in step]
    text = "\n".join(commands)
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert module == "pip" or (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for path in re.findall(r"(?:^|\s)((?:\.ci|tests)/[\w/.]+)", text):
        assert (ROOT / path).exists(), path


def test_ci_uses_oldest_and_newest_supported_versions() -> None:
    matrix = _yaml(GITHUB / "workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    versions = {*matrix["versions"], *(entry["versions"] for entry in matrix["include"])}
    assert versions == {path.stem for path in (ROOT / "constraints").glob("*.txt")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = re.findall(r"cp3(\d+)-", project["tool"]["cibuildwheel"]["build"])
    assert matrix["python"] == [f"3.{minor}" for minor in built]
    assert project["project"]["requires-python"] == f">={matrix['python'][0]}"
    oldest = dict(re.findall(r"^(\w+)==(.*)\.\*$", (ROOT / "constraints/oldest.txt").read_text(), flags=re.MULTILINE))
    assert {f"{name}>={version}" for name, version in oldest.items()} <= set(project["project"]["dependencies"])
    assert set(oldest) == {"torch", "transformers"}


def test_make_setup_uses_the_constrained_versions(tmp_path: Path) -> None:
    def commands(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-n", "setup", f"VENV={tmp_path}", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "-c constraints/tested.txt -r requirements-dev.txt" in commands()
    assert "-c constraints/oldest.txt -r requirements-dev.txt" in commands("CONSTRAINTS=constraints/oldest.txt")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / ".installed-tested").touch()
    assert "requirements-dev.txt" not in commands()
    assert "requirements-dev.txt" in commands("CONSTRAINTS=constraints/oldest.txt"), (
        "another choice of versions installs again"
    )


def test_pre_commit_hooks_equal_make_quality() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hooks = [hook for repo in _yaml(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    quality = re.search(r"^quality:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert quality
    commands = quality[1].replace("\t@", "").replace("$(PY)", ".venv/bin/python").replace("$(VENV)", ".venv")
    assert len(hooks) == len(commands.splitlines())
    for hook, command in zip(hooks, commands.splitlines(), strict=True):
        assert hook["entry"].split(" --")[0] == command.removesuffix(" .").split(" --")[0]


TABLE = """# Coverage

Generated (transformers 5.23.0, torch 2.13.0). …

- 3 of 3 model types have been judged

| model type | class | policy | 2 ranks | 4 ranks | compared | full size | reason |
| --- | --- | --- | --- | --- | --- | --- | --- |
| bert | BertForMaskedLM | written | 100% | 99% | forward | 1 GB |  |
| llama | LlamaForCausalLM | written | 100% | 100% | forward, greedy | 2 GB |  |
| sam3 | Sam3Model | inferred | skipped | skipped |  |  | needs a package |
"""


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        ("| 2 GB |", "| 3 GB |", 0, ""),
        ("written | 100% | 99%", "inferred | 100% | 99%", 0, "`bert` policy: written → inferred"),
        ("100% | 99%", "100% | wrong", 1, "`bert` 4 ranks: 99% → wrong"),
        ("100% | 99%", "100% | 79%", 1, "`bert` 4 ranks: 99% → 79%"),
        (
            "| bert | BertForMaskedLM",
            "| bort | BortForMaskedLM",
            0,
            "`bert` is gone\n- `bort` is new: written, 100%, 99%",
        ),
        ("| sam3 | Sam3Model | inferred | skipped", "| sam4 | Sam | inferred | hanging", 1, "`sam4` is new: inferred"),
    ],
)
def test_changes_of_the_zoo_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, status: int, said: str
) -> None:
    before, after = tmp_path / "before.md", tmp_path / "after.md"
    before.write_text(TABLE)
    assert old in TABLE
    after.write_text(TABLE.replace(old, new))
    assert zoo_changes.main([str(before), str(after)]) == status
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(said) == bool(printed), "without a change nothing is printed"


def test_coverage_table_is_compared_unless_cut_short() -> None:
    assert len(zoo_changes.rows((ROOT / "COVERAGE.md").read_text())) > 600
    with pytest.raises(ValueError, match="2 of 3 model types"):
        zoo_changes.rows(TABLE.replace("- 3 of 3", "- 2 of 3"))
    with pytest.raises(ValueError, match="no coverage table"):
        zoo_changes.rows("| name |\n| --- |\n")


@pytest.mark.slow  # compiles the kernels anew; other tests compare the installed ones with torch
@pytest.mark.parametrize("machine", ["native", "arm64"])
def test_the_c_kernels_agree_with_plain_loops(machine: str) -> None:
    compiler, *runner = ["cc"]
    if machine == "arm64":
        compiler, *runner = ["aarch64-linux-gnu-gcc", "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
    for program in (compiler, *runner[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    environment = {**os.environ, "CC": compiler, "PYTHON": sys.executable}
    if machine == "native":
        environment["CFLAGS"] = "-O1"  # takes a third of the time; other tests cover the installed build
    done = subprocess.run(["bash", SELF_CHECK, *runner], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "fp32",
        "bf16",
        *map("{} ranks".format, (2, 3, 4)),
    ]


def _yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text())
