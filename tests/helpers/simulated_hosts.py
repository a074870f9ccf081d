"""Simulates hosts on this machine: each host has an agent, a thread of the tests, connected over the loopback
interface."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable

from parallelformers_ng.hosts import agent
from parallelformers_ng.hosts.launcher import Launcher
from parallelformers_ng.wire.meeting import Listener, call


class SimulatedHosts(Launcher):
    """A `Launcher` of hosts.

    Args:
        *counts: number of ranks of each host.
        apart: whether hosts have disjoint CPUs, if enough CPUs exist. Each host then has its own fork server, too.
    """

    def __init__(self, *counts: int, apart: bool = False) -> None:
        self.counts = list(counts)
        self._apart = apart
        self.key = secrets.token_bytes(32)
        self.agents: list[threading.Thread] = []
        self._listener = Listener("127.0.0.1", self.key)

    def start(
        self, world_size: int, device: str, deadline: float, check: Callable[[], None]
    ) -> tuple[Listener, list[int]]:
        for number in range(len(self.counts)):
            self.agents.append(threading.Thread(target=self._serve, args=(number, deadline), daemon=True))
            self.agents[-1].start()
        return self._listener, self.counts

    def _serve(self, number: int, deadline: float) -> None:
        if self._apart:
            cpus = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cpus[number % len(cpus) :: len(self.counts)])  # the affinity of this thread alone
        connection = call(self._listener.address, self.key, b"host %d" % number, deadline)
        agent.serve(connection, self._listener.address, self.key, number, f"host-{number}")

    def close(self, patient: bool) -> None:
        self._listener.close()
