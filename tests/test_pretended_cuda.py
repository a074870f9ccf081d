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

CAPTURED = ("llama", "gpt2", "mixtral", "qwen3-moe", "falcon", "gemma3")
FAMILIES = (*CAPTURED, "t5", "bert", "bloom", "mamba", "vit", "whisper")
SLOW = ("qwen3-moe", "gemma3", "bloom", "mamba", "whisper")
AT_ONCE = (("falcon", "eager"), *((family, "auto") for family in FAMILIES if family not in SLOW))
OTHERS = [(family, decode) for decode in ("auto", "eager") for family in FAMILIES if (family, decode) not in AT_ONCE]


@pytest.mark.parametrize(
    ("family", "decode"), [*AT_ONCE, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_forward_and_generate(family: str, decode: Any, pretended: WorkerGroup) -> None:
    case = next(case for case in ALL if case.name == family)
    whole, inputs = case.make(), case.inputs()
    with parallelize(case.make(), workers=pretended, decode=decode) as model:
        assert pretended.call("devices") == {"cuda:0"}
        assert largest_difference(model(**inputs)[0], whole(**inputs)[0]) <= 1e-4
        if not case.generates:
            return
        pretended.call("graphs")
        counted_greedy(model, whole, case, 5, pretended)  # a step is recorded, compared twice, and run again
        per_step = {kind: -count for kind, count in counted_greedy(model, whole, case, 2, pretended).items()}
        for kind, count in counted_greedy(model, whole, case, 3, pretended).items():
            per_step[kind] += count
        assert pretended.call("graphs") == ((1, 6) if decode == "auto" and family in CAPTURED else (0, 0))
    assert (per_step[TO_DEVICE], per_step[TO_HOST], per_step[WAITS]) == (0, 1, 1)


def counted_greedy(model: Any, whole: Any, case: Case, tokens: int, group: WorkerGroup) -> dict[str, int]:
    """What passes between host and device in a greedy `generate`, whose tokens are those of the whole model."""
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    inputs = {name: value for name, value in case.inputs().items() if name != "decoder_input_ids"}
    group.call("counted")
    assert torch.equal(model.generate(**inputs, **how), whole.generate(**inputs, **how))
    return {kind: sum(places.values()) for kind, places in group.call("counted").items()}
