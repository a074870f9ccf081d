"""The entry point of a worker process.

A fork server forks it, or it is started as `python -m parallelformers_ng.runtime.worker CONTROL LIFELINE PARENT`:
CONTROL is the descriptor of an inherited socket, LIFELINE that of a pipe, PARENT the process id at their other ends.
All else comes in the first message.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from parallelformers_ng.runtime import titles

PARENT_GONE = 113  # exit code of a worker whose parent ended


def main() -> None:
    """Start the worker and serve until the parent says goodbye or is gone."""
    control, lifeline, parent = (int(argument) for argument in sys.argv[1:])
    titles.begin("worker", parent)
    run(control, lifeline, [open_parent(parent)])


def run(control: int, lifeline: int, watched: Sequence[int]) -> NoReturn:
    """Serve until the parent says goodbye, or a process that the worker depends on is gone. Ends this process.

    Args:
        control: descriptor of the socket to the parent.
        lifeline: the reading end of a pipe of this worker's own, which nobody ever writes to.
        watched: pidfds of the processes without which the worker ends.
    """
    code = 1
    try:
        end_with_lifeline(lifeline)
        threading.Thread(target=_await_end, args=(watched, control, lifeline), name="parent-watch", daemon=True).start()
        set_signals()
        code = _work(control)
    except BaseException:
        traceback.print_exc()
    finally:
        # Not by way of the interpreter's own end: tearing down torch would cost most of a second for memory that the
        # kernel takes back anyway, and threads that a model's code has left could keep the process for ever.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def set_signals() -> None:
    """Leave Ctrl-C to the parent, and write a traceback when asked for one."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # writes its code location if the parent asks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the caller ignores it, nobody could wait for a child
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # what it prints is no reason to stop it, whatever the terminal says


def end_with_lifeline(lifeline: int) -> None:
    """Have the kernel kill this process when its parent's end of the lifeline closes, whatever it is busy with.

    A process that is stopped, or that loops in native code and never lets go of the interpreter lock, ends as well.
    What it cannot show, while a copy of its other end is open in a child that the parent forked, a thread watches: the
    parent (a pidfd), and the control socket. PR_SET_PDEATHSIG would not do: it fires when the parent's *thread* that
    started the process ends.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def open_parent(parent: int) -> int:
    """Return a pidfd of the parent. This process ends once the parent has ended."""
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(PARENT_GONE)
    if os.getppid() != parent:  # it ended before the pidfd was open, and its number may be another's by now
        os._exit(PARENT_GONE)
    return pidfd


def _await_end(watched: Sequence[int], control: int, lifeline: int) -> None:
    poll = select.poll()
    for pidfd in watched:
        poll.register(pidfd, select.POLLIN)
    poll.register(lifeline, 0)  # it may have been cut before the kernel was asked to watch it
    poll.register(control, 0)  # hang-up alone; what can be read is for the main thread
    poll.poll()
    os._exit(PARENT_GONE)


def _work(control: int) -> int:
    # torch comes with these imports, after the watch has begun.
    from parallelformers_ng.errors import ChannelClosedError
    from parallelformers_ng.runtime import service
    from parallelformers_ng.wire.transport import Channel

    channel = Channel(socket.socket(fileno=control), blocking=True)
    try:
        _, _, boot = channel.recv()
        worker = service.start(channel, boot)
        if worker is None:
            return 1
        worker.serve()
    except ChannelClosedError:
        return PARENT_GONE  # the watch is about to do the same
    worker.communicator.close()
    return 0


if __name__ == "__main__":
    main()
