"""Tests that programs in unusual processes work, or get a clear error at the start."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError, SharedMemoryError, UnsupportedModelError, UnsupportedPlatformError
from parallelformers_ng.runtime import placement
from parallelformers_ng.runtime.spawn import current_folder, module_path
from tests.strangers.agreement import NEW_TOKENS, assert_agree, prompt
from tests.zoo.decoders import decoder, gpt2

HEAD = """
import os, signal, sys, tempfile, time, torch
from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from tests.strangers.agreement import assert_agree, prompt
from tests.zoo.decoders import gpt2
"""
TAIL = """
whole, cut = gpt2(), parallelize(gpt2(), 2)
assert_agree(cut, whole, prompt(5))
cut.deparallelize()
"""
PROGRAMS = {
    "the working folder was deleted": HEAD + "os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())" + TAIL,
    "SIGCHLD is ignored": f"""
import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)
{HEAD}{TAIL}
from parallelformers_ng.runtime import forks
assert forks.running() is not None and forks.running().exit_code() is None, "the fork server has ended"
""",
    "standard error is closed": HEAD + TAIL,
    "gevent has patched all": "from gevent import monkey; monkey.patch_all()" + HEAD + """
try: parallelize(gpt2(), 2)
except ParallelError as error: assert "gevent" in str(error), error
else: raise AssertionError("not refused")
""",
    "gevent has patched threads": "from gevent import monkey; monkey.patch_all(select=False)" + HEAD + """
try: parallelize(gpt2(), 2)
except ParallelError as error: assert "gevent" in str(error), error
else: raise AssertionError("not refused")
""",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_or_is_refused_in_words(name: str, tmp_path: Path) -> None:
    closed = "2>&-" if name == "standard error is closed" else f"2>{tmp_path / 'errors'}"
    command = f'exec {sys.executable} -c "$PROGRAM" {closed}'
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PROGRAM": PROGRAMS[name], "PYTHONPATH": root}
    end = subprocess.run(["bash", "-c", command], env=environment, cwd=root, timeout=120, check=False)
    assert end.returncode == 0, (tmp_path / "errors").read_text() if (tmp_path / "errors").exists() else ""


@pytest.fixture
def in_a_deleted_folder(tmp_path: Path) -> Iterator[None]:
    before = os.getcwd()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    yield
    os.chdir(before)


def test_children_begin_elsewhere_if_the_folder_was_deleted(in_a_deleted_folder) -> None:
    assert current_folder() == "/"
    assert all(os.path.isabs(entry) for entry in module_path())


def test_without_standard_error_there_is_no_bar(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gpt2()
    monkeypatch.setattr(sys, "stderr", None)
    cut = parallelize(gpt2(), workers=groups(2))
    assert_agree(cut, whole, prompt(5))
    cut.deparallelize()


def test_missing_proc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    isdir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: not str(path).startswith("/proc") and isdir(path))
    with pytest.raises(UnsupportedPlatformError, match="/proc, which is not mounted"):
        parallelize(gpt2(), 2)


@pytest.mark.parametrize("modules", [["socket"], ["threading", "select"]])
def test_patches_of_gevent_are_named(monkeypatch: pytest.MonkeyPatch, modules: list[str]) -> None:
    """The test replaces `gevent.monkey` by a stand-in with only `is_module_patched`."""
    monkeypatch.setitem(sys.modules, "gevent.monkey", Patched(modules))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedPlatformError, match=f"has replaced {', '.join(modules)} of"):
        placement.check_platform()


class Patched:
    def __init__(self, modules: list[str]) -> None:
        self.is_module_patched = modules.__contains__


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield limit_files
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_file_size_limit_is_named_for_weights(groups, file_limit: Callable[[int], None]) -> None:
    group, whole, model = groups(2), gpt2(), gpt2()
    file_limit(4096)
    with pytest.raises(SharedMemoryError, match=r"files of more than 4096 bytes.*ulimit -f"):
        parallelize(model, workers=group)
    file_limit(resource.RLIM_INFINITY)
    with torch.no_grad():
        assert torch.equal(model(prompt(5)).logits, whole(prompt(5)).logits)


def test_file_size_limit_is_named_for_messages(groups, file_limit: Callable[[int], None]) -> None:
    cut = parallelize(gpt2(), workers=groups(2))
    file_limit(4096)
    with pytest.raises(SharedMemoryError, match=r"files of more than 4096 bytes.*ulimit -f"):
        cut(inputs_embeds=torch.randn(40, 64, 48))
    file_limit(resource.RLIM_INFINITY)
    assert_agree(cut, gpt2(), prompt(5))
    cut.deparallelize()


def the_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def a_layer(model: Any) -> Any:
    model.model.layers[0].forward = torch.compile(model.model.layers[0].forward, backend="eager")
    return model


def the_model(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def a_part(model: Any) -> Any:
    model.model = torch.compile(model.model, backend="eager")
    return model


@pytest.mark.parametrize("change", [the_forward, a_layer, the_model, a_part])
def test_compiled_models_are_refused_by_name(change: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"compiled by torch\.compile"):
        parallelize(change(decoder("Llama")), 2)


@pytest.mark.parametrize("call", ["forward", "generate"])
def test_cache_handle_in_a_whole_model_is_refused(groups, call: str) -> None:
    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=groups(2))
    ids, last = prompt(6), prompt(1, seed=2)
    cache = cut(ids, use_cache=True).past_key_values
    more = torch.cat([ids, last], 1)
    calls = {
        "forward": lambda: whole(last, past_key_values=cache),
        "generate": lambda: whole.generate(more, past_key_values=cache, **NEW_TOKENS),
    }
    with pytest.raises(ParallelError, match="pass it to the model that returned it"):
        calls[call]()
    with torch.no_grad():
        want = whole(more).logits[:, -1:]
    assert torch.allclose(cut(last, past_key_values=cache).logits, want, atol=1e-4)  # the cache is unchanged
    cut.deparallelize()
