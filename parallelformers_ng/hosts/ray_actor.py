"""The actor that is the agent of its host in a Ray cluster. Importing this file imports nothing that takes long."""

from __future__ import annotations

import time

from parallelformers_ng.runtime import forks


class Agent:
    """The agent of its host, for one group."""

    def serve(self, address: tuple[str, int], key: bytes, number: int, name: str, seconds: float) -> None:
        """Call the caller, who listens at `address`, within so many seconds; then as `agent.serve`."""
        begin = time.monotonic()
        forks.warm_up()  # it imports torch beside this process, not after it
        from parallelformers_ng.hosts import agent
        from parallelformers_ng.wire.meeting import call

        made = call(address, key, b"host %d" % number, begin + seconds)
        agent.serve(made, address, key, number, name)
