"""How long tests wait for what must happen at once, and how they make sure that it can.

Machines that run tests are busy: the limit only tells an answer from a hang. How soon things happen is measured by
`python -m benchmarks.chaos`.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTLY = 20.0  # seconds; well below the minute that groups in the tests give a request
RESTART_SECONDS = 90.0  # far above what it takes, for machines that are busy with other tests


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a child a signal that ends it, and return once it has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, number)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(PROMPTLY * 1000), f"process {pid} goes on after signal {number}"
    finally:
        os.close(pidfd)


def await_incarnation(model: PreTrainedModel, number: int) -> None:
    """Wait until the group of a model was restarted so many times in all, without calling the model."""
    from parallelformers_ng.model.parallelized import deployment_of  # takes seconds, which ranks of collectives save

    end = time.monotonic() + RESTART_SECONDS
    while deployment_of(model).incarnation < number:
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that only waits for its parent to notice has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_end(*pids: int) -> None:
    """Wait until none of these processes runs."""
    end = time.monotonic() + PROMPTLY
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def workers_of(parent: int) -> list[int]:
    """Workers that process `parent` started, and the server that forks them, by what they show of themselves; zombies
    have none."""
    found = []
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:  # it ended meanwhile
            continue
        if re.match(rb"parallelformers-ng: (rank|worker|fork server).*, for process %d\0*$" % parent, line):
            found.append(pid)
    return found
