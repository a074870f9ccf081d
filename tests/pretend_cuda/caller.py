"""Changes the process that calls `parallelize`, so that the process sees pretended devices."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.pretend_cuda import guard
from tests.pretend_cuda.stubs import DEVICES
from tests.zoo.decoders import decoder

TARGET = "tests.pretend_cuda.worker:PretendedRunner"


def small() -> PreTrainedModel:
    """Return the smallest decoder, which has one layer."""
    return decoder("Llama", layers=1)


def believe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `parallelize(workers={"device": "cuda"})` start ranks on pretended devices."""
    if guard.COMPILER is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: DEVICES)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr("parallelformers_ng.model.groups.RUNNER", TARGET)
