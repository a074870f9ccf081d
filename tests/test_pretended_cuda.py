"""Models on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.ledger import TO_DEVICE, TO_HOST, WAITS
from tests.zoo.build import largest_difference
from tests.zoo.case import Case
from tests.zoo.families import ALL

FAMILIES = (
    *("llama", "gpt2", "t5", "bert", "mixtral", "qwen3-moe", "bloom", "falcon", "gemma3", "mamba", "vit"),
    "whisper",
)
OF_TRANSFORMERS = {"falcon": 4}  # its modelling code indexes with a list of numbers: twice in each of two layers


def inputs_of(case: Case) -> dict[str, Any]:
    """What `generate` is given."""
    return {name: value for name, value in case.inputs().items() if name != "decoder_input_ids"}


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_generate(family: str, pretended: WorkerGroup) -> None:
    case = next(case for case in ALL if case.name == family)
    whole, inputs = case.make(), case.inputs()
    with parallelize(case.make(), workers=pretended) as model:
        assert pretended.call("devices") == {"cuda:0"}
        assert largest_difference(model(**inputs)[0], whole(**inputs)[0]) <= 1e-4
        if not case.generates:
            return
        beams = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False}
        assert torch.equal(model.generate(**inputs_of(case), **beams), whole.generate(**inputs_of(case), **beams))
        per_step = {kind: -count for kind, count in counted_greedy(model, whole, case, 2, pretended).items()}
        for kind, count in counted_greedy(model, whole, case, 3, pretended).items():
            per_step[kind] += count
    assert per_step[TO_DEVICE] == OF_TRANSFORMERS.get(family, 0)
    assert (per_step[TO_HOST], per_step[WAITS]) == (0, 1)


def counted_greedy(model: Any, whole: Any, case: Case, tokens: int, group: WorkerGroup) -> dict[str, int]:
    """What passes between host and device in a greedy `generate`, whose tokens are those of the whole model."""
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    group.call("counted")
    assert torch.equal(model.generate(**inputs_of(case), **how), whole.generate(**inputs_of(case), **how))
    return {kind: sum(places.values()) for kind, places in group.call("counted").items()}
