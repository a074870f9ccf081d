"""The entry point of a worker process.

Started as `python -m parallelformers_ng.runtime.worker CONTROL PARENT`, where CONTROL is the descriptor of an
inherited socket and PARENT the process id at its other end. All else comes in the first message.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys

from parallelformers_ng.runtime import watch


def main() -> None:
    """Start the worker and serve until the parent says goodbye or is gone."""
    control, parent = int(sys.argv[1]), int(sys.argv[2])
    watch.exit_with_parent(parent, control)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # torch comes with these imports, after the watch has begun.
    from parallelformers_ng.errors import ChannelClosedError
    from parallelformers_ng.runtime import service
    from parallelformers_ng.runtime.transport import Channel

    channel = Channel(socket.socket(fileno=control))
    try:
        _, _, boot = channel.recv()
        channel.key = boot["key"]
        worker = service.start(channel, boot)
        if worker is not None:
            worker.serve()
    except ChannelClosedError:
        os._exit(watch.PARENT_GONE)  # the watch is about to do the same
    if worker is not None:
        worker.communicator.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # tearing down torch would cost most of a second, for memory that the kernel takes back anyway


if __name__ == "__main__":
    main()
