"""Runs or checks all code of the documents: Python, commands, links, and the files that containers name."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallelformers_ng
from benchmarks import plots
from parallelformers_ng import errors
from parallelformers_ng.cli import commands as cli
from parallelformers_ng.cli import health
from tests.helpers.apart import find_packages

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("*.md", "docs/*.md", "docker/*.md", "examples/**/*.md", "benchmarks/results/*.md")
DOCUMENTS = sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern))
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?^( *)```(\w*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
NOT_RUN = {"README.md": 2, "CONTRIBUTING.md": 2, "docker/README.md": 1}
"""Number of blocks marked as not to be run, by document. Keep it small."""


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(document: Path, language: str, marked: bool = False) -> list[str]:
    """Return a document's code in one language: the blocks to run, or the blocks marked as not to be run."""
    matches = BLOCK.findall(document.read_text())
    return [textwrap.dedent(code) for mark, _, kind, code in matches if kind == language and bool(mark) == marked]


def documents_with(language: str) -> list[Path]:
    return [path for path in DOCUMENTS if blocks(path, language)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder in which documents run; it has the examples, and receives output files."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize("document", documents_with("python"), ids=named)
def test_python_of_documents_runs_in_order(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document runs as a script in this process, which has all imports and a fork server."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    find_packages()  # the document on LoRA imports peft
    script = folder / "document.py"
    script.write_text("\n".join(blocks(document, "python")))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("document", documents_with("sh"), ids=named)
def test_the_commands_of_a_document_run(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for line in filter(None, "\n".join(blocks(document, "sh")).splitlines()):
        program, *arguments = shlex.split(line, comments=True)
        assert program == "parallelformers-ng", f"mark a block that is not to be run: {line!r}"
        assert cli.main(arguments) == 0, line


def test_code_blocks_run_except_marked_ones() -> None:
    marks: Counter[str] = Counter()
    for document in DOCUMENTS:
        matches = BLOCK.findall(document.read_text())
        assert len(matches) * 2 == len(re.findall(r"^ *```", document.read_text(), flags=re.MULTILINE)), document
        assert {kind for _, _, kind, _ in matches} <= {"python", "sh", "text"}, (
            f"{document}: no test runs this language"
        )
        marks[named(document)] = sum(bool(mark) for mark, *_ in matches)
        written = re.findall(r"^<!-- not run", document.read_text(), flags=re.MULTILINE)
        assert len(written) == marks[named(document)], f"{document}: a mark without a block"
    assert +marks == NOT_RUN


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_and_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for path in re.findall(r"`((?:examples|policies|tests|docker|benchmarks|parallelformers_ng)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_not_run_name_existing_things(document: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in "\n".join(blocks(document, "sh", marked=True)).splitlines():
        command = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line), comments=True)
        if command[:1] == ["make"]:
            assert command[1] in targets, line
        elif command[:1] == [".venv/bin/pre-commit"]:
            assert re.search(r"^pre-commit\b", (ROOT / "requirements-dev.txt").read_text(), flags=re.MULTILINE)
        elif command[:2] == ["docker", "compose"]:
            assert all((ROOT / file).exists() for file in command[3 : command.index("up") : 2]), line
        elif command[:2] == ["parallelformers-ng", "serve"]:
            assert served(command[1:]).command is not None, line
        elif command[:2] == ["parallelformers-ng", "plan"]:
            assert served(command[1:]).device, line
        else:
            assert not command, f"{document.name}: no check knows {line!r}"


def test_subcommands_that_are_named_exist() -> None:
    named = {
        name for document in DOCUMENTS for name in re.findall(r"`parallelformers-ng ([a-z]+)", document.read_text())
    }
    assert named
    for name in sorted(named):
        with pytest.raises(SystemExit, match="0"):
            cli.main([name, "--help"])


def test_error_in_policy_md_is_real() -> None:
    import transformers as tf

    from parallelformers_ng import Column, Policy, plan
    from parallelformers_ng.errors import PolicyError

    MyQwen2Policy = type(
        "MyQwen2Policy", (Policy,), {"block": "Qwen2DecoderLayer", "plan": {"mlp.gate_prog": Column()}}
    )
    config = tf.Qwen2Config(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(PolicyError) as error:
        plan(tf.Qwen2ForCausalLM(config), custom_policies=MyQwen2Policy)
    assert str(error.value) in " ".join((ROOT / "POLICY.md").read_text().split())


def test_dockerfile_names_existing_files(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    assert text.index("USER server") < text.index("ENTRYPOINT"), "the server runs without root's rights"
    health = re.search(r'CMD \["python", "-m", "(.*)"\]\n', text)
    assert health
    assert importlib.util.find_spec(health.group(1))
    program, *arguments = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, flags=re.MULTILINE)[0])
    known = served(arguments + json.loads(re.findall(r"^CMD (\[.*\])$", text, flags=re.MULTILINE)[0]))
    assert (program, known.port) == ("parallelformers-ng", 8000)
    assert (ROOT / known.model).exists()


def served(arguments: list[str]) -> argparse.Namespace:
    """Return the options that `parallelformers-ng` reads from a command line that serves."""
    return cli._parser().parse_args(arguments)


def test_compose_files_name_existing_files() -> None:
    yaml = pytest.importorskip("yaml")
    composed = yaml.safe_load((ROOT / "docker/compose.yml").read_text())
    service = composed["services"]["server"]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert not {"ipc", "shm_size", "privileged"} & service.keys()
    assert (ROOT / "docker" / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).exists()
    assert (ROOT / served(["serve", *service["command"]]).model).exists()
    more = yaml.safe_load((ROOT / "docker/compose.ipc-host.yml").read_text())
    assert more == {"services": {"server": {"ipc": "host"}}}
    gpus = yaml.safe_load((ROOT / "docker/compose.gpu.yml").read_text())["services"]["server"]
    assert (ROOT / served(["serve", *gpus["command"]]).model).exists()
    assert gpus["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert service["restart"] == "unless-stopped"


def test_health_check_finds_the_servers_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.toml").write_text('port = 9001\napi_key = "of the file"\nmodel = "x"\n')
    monkeypatch.delenv("PARALLELFORMERS_API_KEY", raising=False)
    start = ["/sbin/docker-init", "--", "/usr/bin/python", "/usr/bin/parallelformers-ng", "serve"]
    options = health.options_of([*start, "--config", str(tmp_path / "server.toml")])
    assert (options.port, options.api_key) == (9001, "of the file")
    monkeypatch.setenv("PARALLELFORMERS_API_KEY", "of the environment")
    options = health.options_of([*start, "x", "--host", "0.0.0.0", "--port", "9002"])
    assert (options.port, options.api_key) == (9002, "of the environment")


def test_compose_file_for_gpus_suits_nccl_and_triton() -> None:
    yaml = pytest.importorskip("yaml")
    service = yaml.safe_load((ROOT / "docker/compose.gpu.yml").read_text())["services"]["server"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["capabilities"] == ["gpu"]
    assert "--num-gpus" not in service["command"]  # by default, one rank per GPU
    assert (ROOT / served(["serve", *service["command"]]).model).exists()
    assert service["shm_size"] == "2gb"
    (mount,) = service["tmpfs"]
    place, _, options = mount.partition(":")
    assert "exec" in options.split(",")
    caches = service["environment"]
    assert {"TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= caches.keys()
    assert all(path == place or path.startswith(f"{place}/") for path in caches.values())
    index, text = service["build"]["args"]["TORCH_INDEX"], (ROOT / "docker/Dockerfile").read_text()
    kept = re.search(r'case "\$\{TORCH_INDEX\}" in (\S+)\) apt-get purge', text)
    assert kept
    assert [fnmatch.fnmatch(url, kept[1]) for url in (index, "https://download.pytorch.org/whl/cpu")] == [False, True]


def test_tables_of_serving_are_generated_from_code() -> None:
    tables = runpy.run_path(str(ROOT / "docs/serving_tables.py"))
    page = (ROOT / "docs/serving.md").read_text()
    assert page == tables["written"](page), "run python docs/serving_tables.py"
    for name, changed in (("options", "| `rows` | `16` |"), ("fields", "| `seed` | acts |"), ("limits", "| 4,096 |")):
        assert changed in tables["TABLES"][name]()
        assert tables["written"](page.replace(changed, "| other |")) == page


def test_map_agrees_with_imports_and_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [
        room.removesuffix("/").removesuffix(".py") for room in re.findall(r"^\| `([\w./]+)` \|", text, re.MULTILINE)
    ]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert rooms == contracts[0]["layers"]
    package = ROOT / "parallelformers_ng"
    # The link to `policies/` is no room: the map describes that folder for itself.
    folders = {path.parent.name for path in package.glob("*/__init__.py") if not path.parent.is_symlink()}
    assert folders | {path.stem for path in package.glob("[a-z]*.py")} == set(rooms)
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert (package / file).exists() or list(package.glob(f"*/{file}")), f"the map names {file}"


def test_picture_in_readme_is_drawn_from_results() -> None:
    results = plots.RESULTS.read_text()
    assert plots.PICTURE.read_text() == plots.draw(results), "run python -m benchmarks.plots"
    assert ">47.3<" in plots.draw(results)
    assert ">48.3<" in plots.draw(results.replace("62.4 / 47.3", "62.4 / 48.3"))


def test_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def pages(nav: object) -> Iterator[str]:
    """Return the files named by a `nav` of mkdocs."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_the_site_has_every_document_once() -> None:
    site = pytest.importorskip("yaml").safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(site["nav"])) == [named(path) for path in DOCUMENTS]
    for hook in site["hooks"]:
        assert (ROOT / hook).exists()


def test_the_api_reference_has_all_that_is_exported() -> None:
    shown = re.findall(r"^::: parallelformers_ng\.(\S+)$", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE)
    exported = set(parallelformers_ng.__all__)
    assert exported - set(shown) == exported & set(vars(errors)), "errors are documented together"
    assert "errors" in shown
    for name in exported:
        assert getattr(parallelformers_ng, name).__doc__, f"{name} has no docstring"
    for path in set(shown) - exported - {"errors"}:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(f"parallelformers_ng.{module}"), name), path
