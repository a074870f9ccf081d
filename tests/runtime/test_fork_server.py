"""Tests that ranks forked from one warm process equal fresh processes."""

from __future__ import annotations

import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from typing import Any

import psutil
import pytest

import parallelformers_ng.worker.imports  # noqa: F401  as a server does
from benchmarks import measure
from parallelformers_ng import parallelize, start_group, warm_up
from parallelformers_ng.errors import WorkerDiedError
from parallelformers_ng.runtime import forks
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker import preload
from tests.helpers.patience import PROMPTLY, await_end, await_incarnation, kill, workers_of
from tests.helpers.runtime_target import Target
from tests.runtime.test_runtime_group import TARGET, environment
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2


class Imports(Target):
    """A target whose fresh process has the imports of forks."""


def server() -> forks.ForkServer:
    running_server = forks.running(preload.IMPORTS)
    assert running_server is not None
    return running_server


def parents(group: WorkerGroup) -> set[int]:
    return {psutil.Process(pid).ppid() for pid in group.pids}


def state_of_process(rank: int) -> dict[str, Any]:
    """Return properties of this process that may differ between a fork and a fresh process."""
    import gc
    import locale
    import threading

    import numpy as np
    import threadpoolctl
    import torch

    kinds = [re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}")) for fd in range(3, 200) if _is_open(fd)]
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {
        "descriptors": sorted(kinds),
        "standard streams": [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1)],
        "environment": dict(os.environ),
        "environment of C": os.popen("env | sort | grep -v ^_=").read(),
        "folder": os.getcwd(),
        "status": {name: status[name] for name in ("Umask", "SigBlk", "SigIgn", "SigCgt", "Threads", "Cpus_allowed")},
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
        "leads its process group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "path": sys.path,
        "arguments": (sys.argv[0], len(sys.argv)),
        "flags": tuple(sys.flags),
        "locale": (locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()),
        "warnings": [str(entry) for entry in warnings.filters],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "pools": sorted((pool["internal_api"], pool["num_threads"]) for pool in threadpoolctl.threadpool_info()),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "logging": (logging.root.manager.disable, logging.root.level),
        "random": (random.random(), np.random.random(), torch.initial_seed()),
        "time zone": time.tzname,
    }


def _is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_fork_equals_a_fresh_process(monkeypatch, tmp_path):
    server()
    monkeypatch.chdir(tmp_path)  # the server has started before
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("A_VARIABLE", "as of now")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    forked = []
    for _ in range(2):
        with WorkerGroup(1, target="tests.runtime.test_fork_server:Imports", threads=1) as group:
            assert parents(group) == {server().pid}
            forked.append(group.call("call_it", state_of_process))
    monkeypatch.setenv(forks.SWITCH, "0")
    with WorkerGroup(1, target="tests.runtime.test_fork_server:Imports", threads=1) as group:
        assert parents(group) == {os.getpid()}
        fresh = group.call("call_it", state_of_process)
    drawn = [draw for state in (*forked, fresh) for draw in state.pop("random")]
    assert len(set(drawn)) == len(drawn), "two ranks draw the same numbers"
    fresh["environment"].pop(forks.SWITCH)
    fresh["environment of C"] = re.sub(rf"{forks.SWITCH}=0\n", "", fresh["environment of C"])
    for state in forked:
        state["descriptors"].remove("anon_inode:[pidfd]")  # a fork also watches its server
        assert state == fresh
    assert forked[0]["environment"]["A_VARIABLE"] == "as of now"
    assert forked[0]["folder"] == str(tmp_path)


def test_ranks_share_one_server_and_leave_nothing():
    WorkerGroup(2, target=TARGET, threads=1).close()
    process = psutil.Process(server().pid)
    before, others = process.num_fds(), set(process.children())
    for _ in range(10):
        with WorkerGroup(3, target=TARGET, threads=1) as group:
            assert parents(group) == {process.pid}
            assert len(set(process.children()) - others) == 3
            assert process.num_threads() == 1
    assert set(process.children()) <= others
    end = time.monotonic() + PROMPTLY
    while process.num_fds() > before:  # the server closes its pipe after the report
        assert time.monotonic() < end, (process.num_fds(), before)
        time.sleep(0.02)


@pytest.fixture
def another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test replace the fork server of all other tests by a fork server that starts faster."""
    monkeypatch.setattr(forks, "_newest", forks._newest)
    monkeypatch.setattr(preload, "IMPORTS", "torch")


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ps_shows_the_role_of_a_process(forked, monkeypatch):
    if not forked:
        monkeypatch.setenv(forks.SWITCH, "0")

    def shown(pid: int) -> str:
        return psutil.Process(pid).cmdline()[0].rstrip("\0")

    with start_group(2, device="cpu") as group:
        assert shown(group.pids[1]) == f"parallelformers-ng: rank 1 of 2, for process {os.getpid()}"
        with parallelize(gpt2(), workers=group):
            expected = f"parallelformers-ng: rank 0 of 2, GPT2LMHeadModel, for process {os.getpid()}"
            assert shown(group.pids[0]) == expected
        assert shown(group.pids[0]) == f"parallelformers-ng: rank 0 of 2, for process {os.getpid()}"
    if forked:
        assert f"parallelformers-ng: fork server, for process {os.getpid()}" in map(shown, workers_of(os.getpid()))


def test_server_starts_early_and_only_once(another_server, monkeypatch):
    monkeypatch.setattr(forks, "_newest", None)
    begun = time.monotonic()
    warm_up()
    warm_up()
    assert time.monotonic() - begun < 1.0  # its imports continue in the background
    pid = server().pid
    with WorkerGroup(1, target=TARGET, threads=1) as group:
        assert parents(group) == {pid}


def test_group_gets_server_with_its_imports(another_server, monkeypatch):
    monkeypatch.setattr(forks, "_newest", None)

    def start(**imports: str) -> tuple[set[int], bool]:
        with WorkerGroup(1, target=TARGET, threads=1, **imports) as group:
            return parents(group), group.call("call_it", lambda _: "tabnanny" in sys.modules)

    first, has = start()
    assert not has
    assert start(imports="torch") == (first, False)
    second, has = start(imports="tabnanny")
    assert has
    assert second != first
    assert start() == (second, True)  # without a wish any server will do
    third, has = start(imports="torch")
    assert not has
    assert third != second


def test_groups_of_models_ask_for_all_imports():
    with start_group(1, device="cpu") as group:
        assert parents(group) == {server().pid}
        assert server().imports == "parallelformers_ng.worker.imports"
        assert group.call("ping") == [0]


def test_changed_inheritance_takes_a_fresh_server(another_server, monkeypatch, tmp_path):
    """The library starts no new fork server for a change that forks read only after their start."""
    first, before = server().pid, forks._inheritance()
    monkeypatch.setenv("NO_LIBRARY_READS_THIS", "1")
    assert server().pid == first
    limits, cpus = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
        assert forks._inheritance() != before
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if len(cpus) > 1:
            os.sched_setaffinity(0, {min(cpus)})
            assert forks._inheritance() != before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.sched_setaffinity(0, cpus)
    mask = os.umask(0o7)
    assert forks._inheritance() != before
    os.umask(mask)
    assert forks._inheritance() == before
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert forks._inheritance() != before
    monkeypatch.setenv("HF_ANYTHING", "1")
    with WorkerGroup(1, target=TARGET, threads=1) as group:
        assert parents(group) == {server().pid} != {first}
        assert group.call("call_it", state_of_process)["environment"]["HF_ANYTHING"] == "1"


def test_replaced_server_lives_as_long_as_its_ranks(another_server, monkeypatch):
    monkeypatch.setenv("HF_ANYTHING", "1")
    with WorkerGroup(1, target=TARGET, threads=1) as group:
        (old,) = parents(group)
        monkeypatch.setenv("HF_ANYTHING", "2")
        assert server().pid != old
        assert group.call("echo", 1) == 1
        assert psutil.pid_exists(old)
    assert not psutil.pid_exists(old)


def test_ranks_share_imports_after_a_model_has_gone():
    """A garbage collection that walks the imports would write to all their pages: 90 MB per rank."""
    with start_group(2, device="cpu") as group:
        with parallelize(gpt2(), workers=group) as model:
            model(**text_inputs())
            before = [measure.memory(pid)["Private_Dirty"] for pid in group.pids]
        after = [measure.memory(pid)["Private_Dirty"] for pid in group.pids]
    assert max(after) < min(before) + 30e6


def test_ranks_end_with_their_server_and_restart():
    model = gpt2()
    parallelize(model, 2, workers={"device": "cpu"})
    want = model(**text_inputs()).logits
    old = server().pid
    kill(old)
    await_incarnation(model, 1)
    assert model(**text_inputs()).logits.equal(want)
    assert server().pid != old
    model.deparallelize()


def test_death_with_the_server_is_reported(another_server, monkeypatch):
    monkeypatch.setenv("HF_ANYTHING", "1")
    with WorkerGroup(1, target=TARGET, threads=1) as group:
        kill(server().pid)
        with pytest.raises(WorkerDiedError, match="died: with its fork server") as caught:
            group.call("sleep", PROMPTLY)
    assert caught.value.exit_code is None
    assert caught.value.signal is None


SCRIPT = """
import os, sys, logging, threading, time
logging.basicConfig(level=logging.DEBUG)
from parallelformers_ng.runtime import forks
from parallelformers_ng.runtime.group import WorkerGroup
group = WorkerGroup(2, target="tests.helpers.runtime_target:Target", threads=1)
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], env=environment() | variables, capture_output=True, text=True)


@pytest.mark.slow
def test_import_with_threads_makes_ranks_fresh_processes(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "if any('fork_server' in argument for argument in sys.orig_argv):\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
    )
    path = f"{environment()['PYTHONPATH']}{os.pathsep}{tmp_path}"
    done = run("print(group.call('sum_of_ranks', 1.0), forks.running())", PYTHONPATH=path)
    assert done.stdout.strip() == "3.0 None", done.stderr
    why = r"an import has started 1 threads \(.+\), which a fork would lack"
    assert re.search(f"rank 0 is started as a fresh process; the fork server has ended: {why}", done.stderr)


def test_server_ends_with_its_caller_despite_children():
    script = """
    child = os.fork()
    if child == 0:
        assert forks._newest is None
        os.closerange(0, 3)
        time.sleep(60)
        os._exit(0)
    print(child, forks.running().pid, *group.pids, flush=True)
    os.kill(os.getpid(), 9)
    """
    done = run(script)
    child, *pids = map(int, done.stdout.split())
    assert done.returncode == -signal.SIGKILL
    await_end(*pids)
    assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE
    os.kill(child, signal.SIGKILL)


def test_ending_interpreter_ends_its_server_silently():
    done = run("print(os.getpid(), forks.running().pid)", PYTHONWARNINGS="always::ResourceWarning")
    caller, pid = map(int, done.stdout.split())
    assert done.returncode == 0
    assert "Warning" not in done.stderr, done.stderr
    await_end(pid)
    assert workers_of(caller) == []


def test_imports_of_ranks_use_no_device():
    code = """
    import os, torch
    from torch.utils._python_dispatch import TorchDispatchMode
    def refuse(*_, **__): raise SystemExit("a device was asked for")  # transformers catches exceptions
    torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = refuse
    torch.cuda.is_current_stream_capturing = refuse
    class Heavy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "mm" not in str(function) and "attention" not in str(function), function
            return function(*args, **(kwargs or {}))
    with Heavy():
        import parallelformers_ng.worker.imports
    print(len(os.listdir("/proc/self/task")))
    """
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment() | variables, capture_output=True, text=True
    )
    assert done.stdout.strip() == "1", done.stderr
