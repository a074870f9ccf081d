"""The watch that a worker keeps on its parent, so that no worker outlives it. It starts before any heavy import."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading

PARENT_GONE = 113  # exit code of a worker whose parent ended


def exit_with_parent(parent: int, control: int, lifeline: int) -> None:
    """End this process at once when its parent is gone, whatever it is busy with.

    The lifeline is watched by the kernel itself, which sends SIGKILL: a worker that is stopped, or that loops in native
    code and never lets go of the interpreter lock, ends as well. A thread watches what the lifeline cannot show while
    a copy of its other end is open in a child that the parent forked: the parent (a pidfd), and the control socket.
    PR_SET_PDEATHSIG would not do: it fires when the parent's *thread* that started the worker ends.

    Args:
        parent: process id of the parent.
        control: descriptor of the control socket.
        lifeline: the reading end of a pipe of this worker's own, which nobody ever writes to.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(PARENT_GONE)
    if os.getppid() != parent:  # it ended before the pidfd was open, and its number may be another's by now
        os._exit(PARENT_GONE)
    threading.Thread(target=_watch, args=(pidfd, control, lifeline), name="parent-watch", daemon=True).start()


def _watch(pidfd: int, control: int, lifeline: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(lifeline, 0)  # it may have been cut before the kernel was asked to watch it
    poll.register(control, 0)  # hang-up alone; what can be read is for the main thread
    poll.poll()
    os._exit(PARENT_GONE)
