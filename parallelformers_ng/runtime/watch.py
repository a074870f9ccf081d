"""The watch that a worker keeps on its parent, so that no worker outlives it. It starts before any heavy import."""

from __future__ import annotations

import os
import select
import threading

PARENT_GONE = 113  # exit code of a worker whose parent ended


def exit_with_parent(parent: int, control: int) -> None:
    """End this process at once when its parent is gone, whatever the main thread is busy with.

    Watched are the parent itself (a pidfd) and the control socket. PR_SET_PDEATHSIG would not do: it fires when the
    parent's *thread* that started the worker ends.

    Args:
        parent: process id of the parent.
        control: descriptor of the control socket.
    """
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(PARENT_GONE)
    if os.getppid() != parent:  # it ended before the pidfd was open, and its number may be another's by now
        os._exit(PARENT_GONE)
    threading.Thread(target=_watch, args=(pidfd, control), name="parent-watch", daemon=True).start()


def _watch(pidfd: int, control: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(control, 0)  # hang-up alone; what can be read is for the main thread
    poll.poll()
    os._exit(PARENT_GONE)
