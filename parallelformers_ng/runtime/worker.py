"""The entry point of a worker process.

Started as `python -m parallelformers_ng.runtime.worker CONTROL LIFELINE PARENT`, where CONTROL is the descriptor of an
inherited socket, LIFELINE that of a pipe, and PARENT the process id at their other ends. All else comes in the first
message.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback

from parallelformers_ng.runtime import watch


def main() -> None:
    """Start the worker and serve until the parent says goodbye or is gone."""
    control, lifeline, parent = (int(argument) for argument in sys.argv[1:])
    watch.exit_with_parent(parent, control, lifeline)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # where it is, in case the parent asks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # what it prints is no reason to stop it, whatever the terminal says
    code = 1
    try:
        code = _work(control)
    except BaseException:
        traceback.print_exc()
    finally:
        # Not by way of the interpreter's own end: tearing down torch would cost most of a second for memory that the
        # kernel takes back anyway, and threads that a model's code has left could keep the process for ever.
        _leave(code)


def _work(control: int) -> int:
    # torch comes with these imports, after the watch has begun.
    from parallelformers_ng.errors import ChannelClosedError
    from parallelformers_ng.runtime import service
    from parallelformers_ng.wire.transport import Channel

    channel = Channel(socket.socket(fileno=control), patient=True)
    try:
        _, _, boot = channel.recv()
        channel.key = boot["key"]
        worker = service.start(channel, boot)
        if worker is None:
            return 1
        worker.serve()
    except ChannelClosedError:
        return watch.PARENT_GONE  # the watch is about to do the same
    worker.communicator.close()
    return 0


def _leave(code: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
