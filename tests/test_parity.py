"""A parallelized model gives what transformers gives in one process: forward, greedy tokens, and the model itself
again."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng import parallelize
from tests.zoo.build import largest_difference
from tests.zoo.families import CASES, Case

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward_and_greedy_tokens(case: Case, world_size: int, groups) -> None:
    model, inputs = case.make(), case.inputs()
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        want = model(**inputs)
        want_tokens = model.generate(**prompt, **GREEDY) if case.generates else None

    parallelize(model, group=groups(world_size))
    got = model(**inputs)
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    assert largest_difference(got[0], want[0]) <= 1e-4
    if case.generates:
        assert torch.equal(model.generate(**prompt, **GREEDY), want_tokens)

    model.deparallelize()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], want[0])
