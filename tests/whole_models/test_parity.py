"""Tests that a parallelized model equals transformers in one process: forward, greedy tokens, and the restored
model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.zoo.build import largest_difference
from tests.zoo.families import CASES, NEWER, Case

GREEDY = {"max_new_tokens": 8, "do_sample": False}


# Threads prove every family's cuts at all world sizes (test_sharding.py). With processes, only the shapes of
# models matter (decoder, encoder, encoder-decoder, vision, mixture of experts, caches of other kinds), and the
# weights that attention returns.
SHAPES = {"gpt2", "bert", "t5", "t5-gated-untied", "vit", "llama", "llama-tied-biased", "mistral", "qwen3", "mixtral"}
CACHES = {"mamba2", "falcon-h1", "rwkv", "recurrent-gemma", "qwen3-next", "minimax", "deepseek-v3", "gemma4", "llava"}
# On a short text BigBird changes its attention while it runs, and the whole model then returns no weights.
WITHOUT_WEIGHTS = {"big-bird-short"}
RUNS = [(case, n) for case in CASES if case.name in SHAPES for n in (1, 2, 3, 4)]
RUNS += [(case, 2) for case in CASES if case.name in WITHOUT_WEIGHTS]
RUNS += [(case, 2) for case in NEWER if case.name in CACHES]


@pytest.mark.parametrize(("case", "world_size"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_forward_and_greedy_tokens(case: Case, world_size: int, groups) -> None:
    compare(case.make(), case, groups(world_size), {})


def first_of_its_family(case: Case) -> bool:
    family = case.name.partition("-")[0]
    return case is next(each for each in CASES if each.name.partition("-")[0] == family)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (not first_of_its_family(case)), id=case.name)
        for case in CASES
        if case.name not in WITHOUT_WEIGHTS
    ],
)
def test_attention_weights_and_hidden_states(case: Case, groups) -> None:
    model = case.make()
    model.set_attn_implementation("eager")  # the implementation that returns weights
    compare(model, case, groups(2), {"output_attentions": True, "output_hidden_states": True})


def compare(model: Any, case: Case, group: WorkerGroup, options: dict[str, Any]) -> None:
    """Assert equal outputs and tokens, and that the model is unchanged afterwards."""
    inputs = case.inputs()
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        want = model(**inputs, **options)
        want_tokens = model.generate(**prompt, **GREEDY) if case.generates else None

    parallelize(model, workers=group)
    got = model(**inputs, **options)
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    assert largest_difference(got[0], want[0]) <= 1e-4
    for name in want:
        if "attentions" in name or "hidden_states" in name:
            assert_close(got[name], want[name])
    if case.generates:
        assert torch.equal(model.generate(**prompt, **GREEDY), want_tokens)

    model.deparallelize()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(**inputs, **options)[0], want[0])


def assert_close(got: object, want: object) -> None:
    """Assert that tensors differ by at most 1e-4 of the largest value, in nested tuples of equal shape."""
    assert type(got) is type(want)
    if isinstance(want, tuple):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert_close(mine, theirs)
    elif isinstance(want, torch.Tensor):
        assert got.shape == want.shape
        assert largest_difference(got, want) <= 1e-4
