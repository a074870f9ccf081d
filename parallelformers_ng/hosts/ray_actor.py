"""Defines the Ray actor that is the agent of its host. This module does not import torch, so its import is fast."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from parallelformers_ng.worker.preload import warm_up


def reserved_devices() -> list[str]:
    """Return the ids of the GPUs that Ray has assigned to this task, as CUDA_VISIBLE_DEVICES takes them."""
    import ray

    return [str(device) for device in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


class Agent:
    def serve(
        self, address: tuple[str, int], key: bytes, number: int, name: str, seconds: float, devices: Sequence[str]
    ) -> None:
        """Connect to the caller, then serve the group as `agent.serve` does.

        If `devices` is not empty, the method sets CUDA_VISIBLE_DEVICES in this process.
        """
        begin = time.monotonic()
        if devices:  # Ray hides all GPUs from this actor, because its ranks, not the actor, have reserved them
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        warm_up()  # starts the fork server, which imports in parallel with the lines below
        from parallelformers_ng.hosts import agent
        from parallelformers_ng.wire.meeting import call

        agent.serve(call(address, key, b"host %d" % number, begin + seconds), address, key, number, name)
