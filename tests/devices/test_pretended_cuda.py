"""Tests models on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.ledger import TO_DEVICE, TO_HOST, WAITS
from tests.zoo.build import largest_difference
from tests.zoo.families import ALL

CAPTURED = ("llama", "gpt2", "mixtral", "qwen3-moe", "falcon", "gemma3", "bloom")
FAMILIES = (*CAPTURED, "t5", "bert", "mamba", "vit", "whisper")
AT_ONCE = [("falcon", "eager", 2), *((family, "auto", 2) for family in ("llama", "gpt2", "mixtral", "t5", "bert"))]
COUNTS = (1, 2, 4)
OTHERS = [  # each family on two of the three numbers of ranks
    (family, decode, count)
    for number, family in enumerate(FAMILIES)
    for decode, count in (("auto", COUNTS[number % 3]), ("eager", COUNTS[(number + 1) % 3]))
    if (family, decode, count) not in AT_ONCE
]
COMPUTED_AS_ONE = {"llama": 2 * 5, "mixtral": 2 * 3, "bert": 2 * 3, "t5": 4 * 3, "gpt2": 0}
"""Layers computed as one product: q, k and v of each layer, gate and up; not layers that read another tensor."""
STEPS = 6  # the prompt, a checked step, two steps compared with a recording, and two more


@pytest.mark.parametrize(
    ("family", "decode", "count"),
    [*AT_ONCE, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_forward_and_generate(
    family: str, decode: Any, count: int, pretended_groups: Callable[[int], WorkerGroup]
) -> None:
    """On pretended devices, reads from freed memory and writes to freed memory raise an error."""
    pretended = pretended_groups(count)
    case = next(case for case in ALL if case.name == family)
    whole, inputs = case.make(), case.inputs()
    with parallelize(case.make(), workers=pretended, decode=decode) as model:
        assert pretended.call("devices") == {"cuda:0"}
        assert largest_difference(model(**inputs)[0], whole(**inputs)[0]) <= 1e-4
        assert pretended.call("computed_as_one") == COMPUTED_AS_ONE.get(family, ANY)
        if not case.generates:
            return
        inputs.pop("decoder_input_ids", None)
        options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
        pretended.call("graphs")
        assert torch.equal(model.generate(**inputs, **options), whole.generate(**inputs, **options))
        assert pretended.call("graphs") == ((1, STEPS - 2) if decode == "auto" and family in CAPTURED else (0, 0))
        step = pretended.call("last_step")
    assert (step.get(TO_DEVICE, 0), step[TO_HOST], step[WAITS]) == (0, 1, 1)
