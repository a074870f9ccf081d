"""Runs a worker process from its start to its end.

A fork server forks the worker, or the command is `python -m parallelformers_ng.runtime.worker CONTROL LIFELINE PARENT`:
CONTROL is the descriptor of an inherited socket, LIFELINE the descriptor of a pipe, and PARENT the id of the process at
their other ends. The first message on the socket has all other settings.
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
    control, lifeline, parent = (int(argument) for argument in sys.argv[1:])
    titles.begin("worker", parent)
    run(control, lifeline, [open_parent(parent)])


def run(control: int, lifeline: int, watched: Sequence[int]) -> NoReturn:
    """Run requests until the parent ends the worker, or a process in `watched` (pidfds) has ended; then exit."""
    code = 1
    try:
        end_with_lifeline(lifeline)
        threading.Thread(target=_await_end, args=(watched, control, lifeline), name="parent-watch", daemon=True).start()
        set_signals()
        code = _work(control)
    except BaseException:
        traceback.print_exc()
    finally:
        # os._exit instead of sys.exit: an ordinary end of torch takes most of a second to free memory that the kernel
        # frees anyway, and threads started by a model's code could keep the process running forever.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


_log = -1  # file descriptor to which this process writes tracebacks


def set_signals() -> None:
    """Set the signal handlers of a worker or a fork server.

    SIGINT (Ctrl-C) is ignored, because only the parent handles it, and so is SIGTTOU. Fatal signals write a
    traceback to standard error. SIGUSR1, by which the parent requests a traceback, writes it to the log of this
    process, also after standard error has become the parent's. SIGCHLD has its default action.
    """
    global _log
    faulthandler.enable()
    # A fork inherits `_log` from its server; then replace the file behind the descriptor.
    _log = os.dup(2) if _log < 0 else os.dup2(2, _log, inheritable=False)
    faulthandler.register(signal.SIGUSR1, file=_log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would make waiting for a child fail
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # output to a terminal must not stop the worker


def end_with_lifeline(lifeline: int) -> None:
    """Make the kernel kill this process when the parent's end of the lifeline closes, whatever this process is doing.

    The kernel also kills a process that is stopped, or that loops in native code without releasing the interpreter
    lock. A child that the parent has forked may keep a copy of the lifeline open; for this case a thread watches the
    parent's pidfd and the control socket. PR_SET_PDEATHSIG is no alternative: its signal is sent when the parent's
    *thread* that started this process ends.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def open_parent(parent: int) -> int:
    """Return a pidfd of the parent process; exit this process if the parent has ended already."""
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(PARENT_GONE)
    if os.getppid() != parent:  # the parent has ended, and another process may have its id
        os._exit(PARENT_GONE)
    return pidfd


def _await_end(watched: Sequence[int], control: int, lifeline: int) -> None:
    poll = select.poll()
    for pidfd in watched:
        poll.register(pidfd, select.POLLIN)
    poll.register(lifeline, 0)  # the event mask 0 reports only that the parent's end is closed
    poll.register(control, 0)  # the event mask 0 ignores messages, which the main thread reads
    poll.poll()
    os._exit(PARENT_GONE)


def _work(control: int) -> int:
    # Import torch only here, after the thread that watches the parent was started.
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
        return PARENT_GONE  # the thread that watches the parent exits with this code, too
    worker.communicator.close()
    return 0


if __name__ == "__main__":
    main()
