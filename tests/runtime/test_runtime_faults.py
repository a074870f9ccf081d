"""Tests faults of the worker group: each fault becomes a typed error in time, and no process or file is left over."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from parallelformers_ng.errors import (
    GroupError,
    ProtocolError,
    RequestTimeoutError,
    StartupError,
    WorkerDiedError,
    WrongProcessError,
)
from parallelformers_ng.runtime import forks
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.wire.frame import FrameKind
from parallelformers_ng.wire.message import NOTHING, encode, pack
from tests.helpers.patience import PROMPTLY, await_end, is_running, kill
from tests.runtime.test_runtime_group import TARGET, environment


@pytest.fixture
def group():
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        yield group
    assert not any(psutil.pid_exists(pid) for pid in group.pids)


def fault_of(function, *args, **kwargs):
    """Call a function that must raise a GroupError, soon, and return the error."""
    start = time.monotonic()
    with pytest.raises(GroupError) as caught:
        function(*args, **kwargs)
    assert time.monotonic() - start < PROMPTLY
    return caught.value


@pytest.mark.parametrize(("method", "rank"), [("spin", 1), ("meet", 0)])
def test_a_killed_worker_is_named_to_every_caller(group, method, rank):
    errors = []

    def work():
        try:
            if method == "meet":
                group.call("sleep", 60, [1 - rank])
            else:
                group.call(method)
        except WorkerDiedError as error:
            errors.append((error, time.monotonic()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(group.pids[rank], signal.SIGKILL)
    for thread in threads:
        thread.join(PROMPTLY)
    assert len(errors) == 3
    for error, when in errors:
        assert (error.rank, error.signal, error.exit_code) == (rank, signal.SIGKILL, None)
        assert when - killed < PROMPTLY
    assert not group.alive
    assert fault_of(group.call, "echo", 1).rank == rank


def test_worker_death_is_found_by_the_next_request(group):
    kill(group.pids[1], signal.SIGTERM)
    assert not group.alive
    error = fault_of(group.call, "echo", 1)
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.signal) == (1, signal.SIGTERM)


def test_exit_codes_and_crashes_are_told_apart(group):
    assert "SystemExit: 7" in str(fault_of(group.call, "leave", 7))  # the exit of a callback, not of the worker
    error = fault_of(group.call, "exit", 1, 5)
    assert (error.rank, error.signal, error.exit_code) == (1, None, 5)


@pytest.mark.parametrize(("method", "signal"), [("crash", signal.SIGSEGV), ("touch_lost_memory", signal.SIGBUS)])
def test_native_crash_is_reported_with_signal_and_traceback(method, signal, capfd):
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        error = fault_of(group.call, method, 0)
    assert (error.rank, error.signal) == (0, signal)
    assert f"in {method}" in capfd.readouterr().err


@pytest.mark.parametrize("level", [None, "ERROR"])
def test_native_code_logs_errors_only_on_request(level, capfd, monkeypatch):
    """Callers get typed errors. torch reads the level at its import, so a running fork server would keep its level."""
    if level is not None:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", level)
        monkeypatch.setenv(forks.SWITCH, "0")
    with WorkerGroup(1, target=TARGET, threads=1) as group:
        group.call("connect_to_nobody")
    assert ("[c10d]" in capfd.readouterr().err) == (level is not None)


def test_a_stopped_worker_runs_into_the_deadline(group):
    os.kill(group.pids[1], signal.SIGSTOP)
    error = fault_of(group.call, "sum_of_ranks", 1.0, deadline=time.monotonic() + 0.5)
    assert isinstance(error, RequestTimeoutError)
    assert "no answer from ranks" in str(error)
    later = fault_of(group.call, "echo", 1)
    assert "ran past its deadline" in str(later)


def test_mangled_frames_end_the_group_alone():
    source = random.Random(1)
    data = bytearray(pack(FrameKind.RESULT, 1, encode({"result": 1})).data)
    mangled = bytearray(data)
    mangled[source.randrange(4)] ^= 0xFF
    stale = pack(FrameKind.RESULT, 9, encode({"result": 1})).data
    foreign = pack(FrameKind.READY, 1, encode(None)).data
    empty = pack(FrameKind.RESULT, 1, NOTHING).data
    for frame in (bytes(mangled), stale, foreign, empty):
        with WorkerGroup(1, target=TARGET, threads=1) as group:
            assert isinstance(fault_of(group.call, "write_to_parent", frame), ProtocolError)
            assert isinstance(fault_of(group.call, "echo", 1), ProtocolError)


@pytest.mark.parametrize(
    ("target", "pattern"),
    [
        (
            "tests.helpers.runtime_target:FailsToBuild",
            "(?s)rank 1 raised while building FailsToBuild: LookupError: no weights.*says why",
        ),
        (
            "tests.helpers.runtime_target:DiesWhileBuilding",
            "(?s)rank 1 ended while building Dies.*: exit code 7.*last words",
        ),
        ("missing_module:Target", "raised while importing missing_module:Target: ModuleNotFoundError"),
    ],
)
def test_a_worker_that_cannot_start_says_why(target, pattern):
    WorkerGroup(1, target=TARGET, threads=1).close()  # starts the fork server, whose descriptor stays open
    me = psutil.Process()
    before, children = me.num_fds(), set(me.children())
    with pytest.raises(StartupError, match=pattern):
        WorkerGroup(2, target=target, threads=1, start_timeout=60)
    assert set(me.children()) <= children
    assert me.num_fds() <= before


@pytest.mark.parametrize("forked", [True, False])
def test_no_worker_starts_without_file_descriptors(forked, monkeypatch):
    if forked:  # the running server forks, whatever this process's limit
        monkeypatch.setattr(forks, "_inheritance", lambda: None)
        WorkerGroup(1, target=TARGET, threads=1).close()
    else:
        monkeypatch.setenv(forks.SWITCH, "0")
    gc.collect()  # garbage of earlier tests must not free descriptors meanwhile
    me = psutil.Process()
    children, limits = set(me.children()), resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    fillers = [os.dup(0)]
    while fillers[-1] <= highest:
        fillers.append(os.dup(0))
    before = me.num_fds()
    for more in range(1, 12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + more, limits[1]))
        try:
            with pytest.raises(StartupError, match="open files"):
                WorkerGroup(2, target=TARGET, threads=1, start_timeout=60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert me.num_fds() <= before, more
    for fd in fillers:
        os.close(fd)
    assert set(me.children()) <= children


def test_worker_never_ready_runs_into_the_deadline():
    forks.running()
    children = set(psutil.Process().children())
    with pytest.raises(StartupError, match=r"rank . was not ready within 0.5 s; it was (importing|building)"):
        WorkerGroup(2, target="tests.helpers.runtime_target:NeverReady", threads=1, start_timeout=0.5)
    assert set(psutil.Process().children()) <= children


def test_forked_child_is_refused_and_keeps_no_worker(group):
    assert group.call("echo", 1) == 1
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.call("echo", 1)
        except WrongProcessError as error:
            closed = all(worker.channel.fileno() == worker.pidfd == -1 for worker in group._processes.workers)
            os.write(write, f"{error} closed={closed}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    answer = os.read(read, 1000)
    assert b"must parallelize the model itself" in answer
    assert b"closed=True" in answer
    os.close(read)
    assert group.call("sum_of_ranks", 1.0) == 3.0


ORPHANING = """
import ctypes, os, re, signal, subprocess, sys, threading, time
from parallelformers_ng.runtime.group import WorkerGroup

def endless(rank):  # within native code, which never lets go of the interpreter lock
    re.match("(a+)+$", "a" * 60 + "b")

def crash(rank):  # and blocks while it writes its traceback to standard error, a full pipe that nobody reads
    ctypes.string_at(0)

def stop(group, rank):
    os.kill(group.pids[rank], signal.SIGSTOP)

def lend(group):  # copies of all ends to a child that lives on
    worker = group._processes.workers[0]
    subprocess.Popen(["sleep", "8"], pass_fds=[worker.lifeline, worker.channel.fileno()])

FAULTS = {
    "in a Python loop": (1, lambda group: group.call("spin")),
    "in native code": (1, lambda group: group.call("call_it", endless)),
    "crashed into a full pipe": (1, lambda group: group.call("call_it", crash)),
    "in a collective whose peer is stopped": (2, lambda group: (stop(group, 1), group.call("meet"))),
    "while its sockets live on": (1, lend),
}

full = os.pipe()[1]
os.dup2(full, 2)
target = "tests.helpers.runtime_target:Target"
groups = {name: WorkerGroup(size, target=target, threads=1) for name, (size, _) in FAULTS.items()}
os.set_blocking(2, False)
try:
    while os.write(2, b" " * 4096): pass
except BlockingIOError:
    os.set_blocking(2, True)
for name, (_, fault) in FAULTS.items():
    print(name, *groups[name].pids, sep=",", flush=True)
    threading.Thread(target=fault, args=(groups[name],)).start()
time.sleep(60)
"""


def test_workers_end_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHANING], env=environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = {}
    for _ in range(5):
        name, *pids = parent.stdout.readline().strip().split(",")
        workers.update({int(pid): name for pid in pids})
    assert len(workers) == 6
    time.sleep(1.0)
    assert not [name for pid, name in workers.items() if not is_running(pid)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await_end(*workers)


INTERRUPTED = """
import os, signal, threading, time
from parallelformers_ng.runtime import request_loop
from parallelformers_ng.runtime.group import WorkerGroup
request_loop.STRAGGLER_SECONDS = 2.0
with WorkerGroup(2, target="tests.helpers.runtime_target:Target", threads=1) as group:
    # The second does not hear of it for a time: whoever comes next waits for it.
    for method, arguments in [("wait_for_cancel", ()), ("sleep", (1.5, [1]))]:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            print(group.call(method, *arguments))
        except KeyboardInterrupt:
            print("interrupted", group.call("echo", method), group.call("sum_of_ranks", 1.0))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        group.call("spin")
    except KeyboardInterrupt:
        print("spin", time.monotonic() - start < 20)
    try:
        group.call("echo", 1)
    except Exception as error:
        print(type(error).__name__, "interrupted request" in str(error), group.alive)
"""


def test_after_ctrl_c_the_next_answer_is_right():
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env=environment(), capture_output=True, text=True, timeout=90
    )
    assert result.stdout.splitlines() == [
        "interrupted wait_for_cancel 3.0",
        "interrupted sleep 3.0",
        "spin True",
        "GroupError True False",
    ], result.stderr
    assert result.returncode == 0
