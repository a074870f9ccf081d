"""Defines processors and criteria of callers. The module is separate from the tests, so that workers need not import
tests."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, StoppingCriteria


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Favours(LogitsProcessor):
    """A processor that adds a bias to the scores, and keeps its inputs."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = Pair(bias, bias * 2)
        self.sums: list[torch.Tensor] = []
        self.total = torch.zeros(bias.shape[-1])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.sums.append(scores.sum())
        self.total = self.total + scores[0]
        return scores + self.bias.second


class EndsAt(StoppingCriteria):
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.ids)


class Draws(LogitsProcessor):
    """A processor with its own random stream on the host."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.randn(scores.shape[-1], generator=self.generator).to(scores.device)


class Counts(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


class RaisesOn(StoppingCriteria):
    """A criterion that raises on one rank while all other ranks wait in an exchange."""

    def __init__(self, pid: int, length: int) -> None:
        self.pid, self.length = pid, length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if os.getpid() == self.pid and input_ids.shape[1] == self.length:
            time.sleep(0.2)  # after this the peer waits in the exchange
            raise ValueError("only here")
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Breaks(StoppingCriteria):
    """A criterion that makes one rank's next collective fail, and makes NCCL report the failure to its watchdog."""

    def __init__(self, pid: int, length: int) -> None:
        self.pid, self.length = pid, length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if os.getpid() == self.pid and input_ids.shape[1] == self.length:
            from tests.pretend_cuda import process_group

            process_group.fail_next = True
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
