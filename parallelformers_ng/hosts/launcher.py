"""Defines the interface of launchers, which start the agents on the hosts."""

from __future__ import annotations

from collections.abc import Callable

from parallelformers_ng.wire.meeting import Listener

Check = Callable[[], None]


class Launcher:
    """Base class of launchers, which start an agent on each host of one group.

    Attributes:
        key: secret key by which agents and caller authenticate each other.
        threads: number of CPU threads of each rank; None divides the CPUs of each host among its ranks.
    """

    key: bytes
    threads: int | None = None

    def start(self, world_size: int, device: str, deadline: float, check: Check) -> tuple[Listener, list[int]]:
        """Start the agents. A thread of the group calls this method.

        Args:
            device: "cpu" or "cuda", the type of the ranks' devices. With "cuda", the first devices that an agent sees
                must be the devices of its ranks.
            check: function that raises if waiting has become useless; the method must call it a few times a second.

        Returns:
            (listener to which the agents connect, number of ranks of each host).
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise StartupError if a started agent has ended, so that it will never connect. By default, do nothing."""

    def close(self, patient: bool) -> None:
        """Release the resources of the ended group. Further calls do nothing. By default, do nothing.

        Args:
            patient: whether to wait until the agents end by themselves; False if a host is lost.
        """
