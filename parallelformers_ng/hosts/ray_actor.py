"""The actor that is the agent of its host in a Ray cluster. Importing this file imports nothing that takes long."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from parallelformers_ng.worker.preload import warm_up


def reserved_devices() -> list[str]:
    """Return the devices of this bundle, from CUDA_VISIBLE_DEVICES."""
    import ray

    return [str(device) for device in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


class Agent:
    """The agent of its host, for one group."""

    def serve(
        self, address: tuple[str, int], key: bytes, number: int, name: str, seconds: float, devices: Sequence[str]
    ) -> None:
        """Call the caller, who listens at `address`, within so many seconds; then as `agent.serve`.

        Args:
            devices: devices of its ranks for CUDA_VISIBLE_DEVICES; none on the CPU.
        """
        begin = time.monotonic()
        if devices:  # Ray has set it to those of this actor, which has none
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        warm_up()  # it imports torch beside this process, not after it
        from parallelformers_ng.hosts import agent
        from parallelformers_ng.wire.meeting import call

        connection = call(address, key, b"host %d" % number, begin + seconds)
        agent.serve(connection, address, key, number, name)
