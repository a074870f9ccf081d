"""Tests the command `health`, which looks at the ranks of another process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parallelformers_ng.cli import commands
from parallelformers_ng.errors import GroupError
from parallelformers_ng.runtime.group import WorkerGroup

TARGET = "tests.helpers.runtime_target:Target"


def shown(capsys: pytest.CaptureFixture[str], pid: int) -> str:
    capsys.readouterr()
    assert commands.main(["health", str(pid)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("forks", ["1", "0"])
def test_ranks_of_a_running_request_are_shown(forks, capsys, monkeypatch):
    monkeypatch.setenv("PARALLELFORMERS_NG_FORK_SERVER", forks)
    with WorkerGroup(2, target=TARGET, threads=1) as group, WorkerGroup(1, target=TARGET, threads=1) as idle:
        group.call("meet")

        def call() -> None:
            with pytest.raises(GroupError):
                group.call("late_to_meet", 1)

        thread = threading.Thread(target=call)
        thread.start()
        waits, late = (f"rank {rank} \\(pid {pid}, S \\(sleeping\\), " for rank, pid in enumerate(group.pids))
        end, text = time.monotonic() + 20, ""
        while not (re.search(waits, text) and re.search(late, text)) and time.monotonic() < end:  # a rank may still run
            time.sleep(0.2)
            text = shown(capsys, os.getpid())
        assert f"parallelformers-ng: rank 0 of 2, for process {os.getpid()}\n" in text
        last = "the last all_reduce of 1 numbers, runs 'late_to_meet'\\):\n"
        assert re.search(waits + "2 steps of collectives, " + last + "  .*/shared_memory.py, line .*, in sum\n", text)
        assert re.search(late + "1 steps of collectives, " + last + "  .*_target.py, line .*, in late_to_meet\n", text)
        assert re.search(rf"rank 0 \(pid {idle.pids[0]}, S \(sleeping\), waits for a request\):\n", text)
        assert idle.call("echo", 1) == 1
        group.close()
        thread.join()
        after = shown(capsys, os.getpid())
        assert f"pid {idle.pids[0]}," in after
        assert not any(f"pid {pid}," in after for pid in group.pids)


def test_stopped_rank_stays_stopped(capsys):
    with WorkerGroup(1, target=TARGET, threads=1) as group:
        os.kill(group.pids[0], signal.SIGSTOP)
        assert f"rank 0 (pid {group.pids[0]}, T (stopped)): no traceback\n" in shown(capsys, os.getpid())
        assert "State:\tT" in Path(f"/proc/{group.pids[0]}/status").read_text()
        os.kill(group.pids[0], signal.SIGCONT)
        assert group.call("echo", 1) == 1


def test_process_without_groups_is_refused(capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert commands.main(["health", str(process.pid)]) == 1
        assert capsys.readouterr().err == f"parallelformers-ng: process {process.pid} has no groups of workers\n"
        process.communicate()
    assert commands.main(["health", str(process.pid)]) == 1
    assert capsys.readouterr().err == f"parallelformers-ng: there is no process {process.pid}\n"


@pytest.mark.skipif(os.access("/proc/1/fd", os.R_OK), reason="this user may inspect process 1")
def test_process_of_another_user_is_refused(capsys):
    assert commands.main(["health", "1"]) == 1
    text = "parallelformers-ng: process 1 cannot be inspected, because it belongs to another user\n"
    assert capsys.readouterr() == ("", text)
