"""Models on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.caller import TARGET, believe
from tests.zoo.build import largest_difference
from tests.zoo.families import ALL

FAMILIES = (
    *("llama", "gpt2", "t5", "bert", "mixtral", "qwen3-moe", "bloom", "falcon", "gemma3", "mamba", "vit"),
    "whisper",
)


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch)


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        believe(patch)
        with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
            yield group


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_generate(family: str, group: WorkerGroup) -> None:
    case = next(case for case in ALL if case.name == family)
    whole, inputs = case.make(), case.inputs()
    with parallelize(case.make(), workers=group) as model:
        assert group.call("devices") == {"cuda:0"}
        assert largest_difference(model(**inputs)[0], whole(**inputs)[0]) <= 1e-4
        if case.generates:
            inputs = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
            for way in ({}, {"num_beams": 3}):
                how = {"max_new_tokens": 8, "do_sample": False} | way
                assert torch.equal(model.generate(**inputs, **how), whole.generate(**inputs, **how))
