"""Fixtures for tests of other libraries, each with a whole model and with a parallelized copy. `make ecosystem` runs
the tests."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # must be set before these libraries are imported
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import is_parallelized
from tests.helpers.real_weights import minilm, smollm2


@dataclass
class Pair:
    """A whole model and a parallelized model with the same weights."""

    whole: Any
    cut: Any
    tokenizer: Any

    def both(self, run: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the results of `run` with the parallelized model and with the whole model. The parallelized model must
        stay parallelized."""
        want, got = run(self.whole), run(self.cut)
        assert is_parallelized(self.cut), "the parallelization ended"
        return got, want


def _pair(load: Callable[[], tuple[Any, Any]], groups: Any) -> Iterator[Pair]:
    whole, tokenizer = load()
    with parallelize(copy.deepcopy(whole), workers=groups(2), progress=False) as cut:
        yield Pair(whole, cut, tokenizer)


@pytest.fixture(scope="session")
def language_model(groups) -> Iterator[Pair]:
    yield from _pair(smollm2, groups)


@pytest.fixture(scope="session")
def encoder(groups) -> Iterator[Pair]:
    yield from _pair(minilm, groups)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call the machine claims to have a GPU; tensors put there are copies on the CPU."""
    put = torch.Tensor.to

    def put_or_copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        on_gpu = any(str(each).startswith("cuda") for each in (*args, *kwargs.values()))
        return tensor.clone() if on_gpu else put(tensor, *args, **kwargs)

    def pretend() -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.Tensor, "to", put_or_copy)

    return pretend
