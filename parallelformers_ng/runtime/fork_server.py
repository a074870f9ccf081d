"""Runs the fork server: a process that imports the modules of ranks once, and then forks ranks on request.

The server has one thread and uses no device, so a fork behaves like a fresh process, and starts in milliseconds. The
command is `python -m parallelformers_ng.runtime.fork_server REQUESTS LIFELINE PARENT MODULE`: REQUESTS is the
descriptor of an inherited socket, LIFELINE the descriptor of a pipe, PARENT the id of the process at their other ends
(see `forks.py`), and MODULE the module to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import os
import select
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from parallelformers_ng.collectives.control_groups import kernel_text
from parallelformers_ng.runtime import titles, worker
from parallelformers_ng.runtime.spawn import poll_of

# A report about a rank is an int32. The first report is the process id, or minus an errno; the second, the exit code.
NUMBER = struct.Struct("<i")

# Names of threads that a fork does not need. jemalloc, which pyarrow starts, does without its thread in a fork
# (`background_thread_postfork_child` in https://github.com/jemalloc/jemalloc/blob/dev/src/background_thread.c).
_NEEDLESS_THREADS = {"jemalloc_bg_thd"}
# Result of the driver's `cuInit` in a fork of a process that has initialized the driver: "not initialized"
# (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html).
_NOT_INITIALIZED = 3

# Descriptors in a request: socket, lifeline, standard error, standard output, folder, socket for reports.
_DESCRIPTORS = 6


def main() -> None:
    """Fork ranks on request until the caller has ended or closed its socket.

    The process exits with code 1 if the import fails, has started threads, which a fork would lack, or has initialized
    CUDA, which a fork could not use.
    """
    *numbers, imports = sys.argv[1:]
    control, lifeline, caller = map(int, numbers)
    worker.end_with_lifeline(lifeline)
    titles.begin("fork server", caller)
    watched = worker.open_parent(caller), os.pidfd_open(os.getpid())
    worker.set_signals()
    gc.disable()
    importlib.import_module(imports)
    if reason := _why_no_forks():
        print(reason, file=sys.stderr, flush=True)
        os._exit(1)  # `sys.exit` would wait for the threads that an import has started
    # The objects of the imports are never freed. freeze() makes the collector skip them; otherwise its first pass in a
    # rank would write to every page, and ranks would no longer share the pages.
    gc.collect()
    gc.freeze()
    _Server(socket.socket(fileno=control), lifeline, watched).serve()


def _why_no_forks() -> str | None:
    numbers = [number for number in os.listdir("/proc/self/task") if int(number) != os.getpid()]
    names = sorted(kernel_text(f"/proc/self/task/{number}/comm") for number in numbers)
    threads = [name for name in names if name not in _NEEDLESS_THREADS]
    # `_cannot_use_devices` decides whether threads of the CUDA driver forbid forks.
    if needed := [name for name in threads if not name.startswith("cuda")]:
        return f"an import has started {len(needed)} threads ({', '.join(needed)}), which a fork would lack"
    pid = _fork_quietly()
    if pid == 0:
        os._exit(_cannot_use_devices(asks_driver=bool(threads)))
    if os.waitpid(pid, 0)[1]:
        return "an import has initialized CUDA, so a fork could not use devices"
    return None


def _cannot_use_devices(asks_driver: bool) -> bool:
    """Whether forks could not use CUDA devices. Runs in a fork, because asking the driver may initialize it."""
    import torch

    return torch.cuda._is_in_bad_fork() or (asks_driver and ctypes.CDLL("libcuda.so.1").cuInit(0) == _NOT_INITIALIZED)


def _fork_quietly() -> int:
    """Fork without Python's warning about threads, because `_why_no_forks` checks the threads of this process."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return os.fork()


class _Server:
    """Forks ranks on request, and reports their process ids and exit codes.

    Args:
        lifeline: read end of a pipe; the kernel kills this process when the write end closes.
        watched: pidfds of the caller and of this process; a rank ends if either process ends.
    """

    def __init__(self, requests: socket.socket, lifeline: int, watched: tuple[int, int]) -> None:
        self._requests = requests
        self._lifeline = lifeline
        self._watched = watched
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # pidfd → (process id, socket for reports)
        self._poll = poll_of([requests.fileno(), watched[0]])

    def serve(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._watched[0]:
                    return
                if fd in self._ranks:
                    self._report_end(fd)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        message, descriptors, *_ = socket.recv_fds(self._requests, 1, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if message and len(descriptors) == _DESCRIPTORS:
            *rank, report_fd = descriptors
            self._fork(rank, socket.socket(fileno=report_fd))
            descriptors = rank
        # With too many open files, the kernel passes only some descriptors. The caller then sees its socket close.
        for fd in descriptors:
            os.close(fd)
        return bool(message)

    def _fork(self, descriptors: Sequence[int], report: socket.socket) -> None:
        try:
            pid = _fork_quietly()
            if pid == 0:
                self._become_rank(descriptors, report)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            self._send(report, -(error.errno or errno.EAGAIN))
            report.close()
            return
        self._ranks[pidfd] = pid, report
        self._poll.register(pidfd, select.POLLIN)
        self._send(report, pid, [pidfd])

    def _report_end(self, pidfd: int) -> None:
        pid, report = self._ranks.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._send(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        report.close()

    @staticmethod
    def _send(report: socket.socket, number: int, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # the caller may have closed its end of the socket
            socket.send_fds(report, [NUMBER.pack(number)], descriptors)

    def _become_rank(self, descriptors: Sequence[int], report: socket.socket) -> NoReturn:
        """Make this fork equal to a fresh process, and run a worker in it."""
        try:
            control, lifeline, errors, output, folder = descriptors
            for pidfd, (_, other) in self._ranks.items():
                os.close(pidfd)
                other.close()
            report.close()
            self._requests.close()
            os.close(self._lifeline)
            os.setpgid(0, 0)  # Ctrl-C in the terminal must reach only the caller
            os.fchdir(folder)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            for fd in (errors, output, folder):
                os.close(fd)
            sys.argv = [worker.__file__, str(control), str(lifeline), sys.argv[3]]
            # Reset state that a fresh process would not have. Python itself reseeds `random` in a fork.
            import numpy as np
            import torch

            np.random.seed()
            torch.default_generator.seed()
            importlib.invalidate_caches()  # new files may exist since the server's imports
            gc.enable()
            worker.run(control, lifeline, self._watched)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
