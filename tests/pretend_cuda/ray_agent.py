"""Provides the agent of a Ray node with pretended devices."""

from __future__ import annotations

from typing import Any

from parallelformers_ng.hosts.ray_actor import Agent


class PretendedAgent(Agent):
    """An agent that makes torch see the devices that Ray reports."""

    def serve(self, *arguments: Any) -> None:
        import torch

        from tests.pretend_cuda.stubs import DEVICES

        torch.cuda.device_count = lambda: DEVICES
        super().serve(*arguments)
