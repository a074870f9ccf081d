"""How long tests wait for what must happen at once, and how they make sure that it can.

Machines that run tests are busy: the limit only tells an answer from a hang. How soon things happen is measured by
`python -m benchmarks.chaos`.
"""

from __future__ import annotations

import os
import select
import signal

PROMPTLY = 20.0  # seconds; well below the minute that groups in the tests give a request


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
