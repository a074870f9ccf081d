"""Defines time limits of tests for events that must come at once, and helpers that cause such events.

Machines that run tests are busy, so the limits are long, and only detect a hang. `python -m benchmarks.chaos` measures
how soon events come.
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

PROMPTLY = 20.0  # seconds; well below the minute that groups in tests allow a request
RESTART_SECONDS = 90.0  # seconds; far above the usual time, for machines busy with other tests


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
    """Wait until the group of a model has restarted `number` times in total, without a call of the model."""
    from parallelformers_ng.model.parallelized import deployment_of  # slow; collectives do not need it

    end = time.monotonic() + RESTART_SECONDS
    while deployment_of(model).incarnation < number:
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie, which only waits for its parent, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_end(*pids: int) -> None:
    """Wait until all given processes have ended."""
    end = time.monotonic() + PROMPTLY
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def workers_of(parent: int) -> list[int]:
    """Return the workers started by process `parent`, and their fork server, by their command lines; zombies have
    none."""
    pids = []
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:  # the process has just ended
            continue
        if re.match(rb"parallelformers-ng: (rank|worker|fork server).*, for process %d\0*$" % parent, line):
            pids.append(pid)
    return pids
