"""A parallelized model gives what transformers gives in one process: forward, greedy tokens, and the model itself
again."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng import parallelize
from tests.zoo.build import largest_difference
from tests.zoo.families import CASES, NEWER, Case

GREEDY = {"max_new_tokens": 8, "do_sample": False}


# Every family's cutting is proven at all world sizes by threads (test_sharding.py); through processes it is the shapes
# of models that matter: decoder, encoder, encoder-decoder, vision, mixture of experts, and caches of other kinds.
SHAPES = {"gpt2", "bert", "t5", "t5-gated-untied", "vit", "llama", "llama-tied-biased", "mistral", "qwen3", "mixtral"}
CACHES = {"mamba2", "falcon-h1", "rwkv", "recurrent-gemma", "qwen3-next", "minimax", "deepseek-v3", "gemma4", "llava"}
RUNS = [(case, n) for case in CASES for n in ((1, 2, 3, 4) if case.name in SHAPES else (2,))]
RUNS += [(case, 2) for case in NEWER if case.name in CACHES]


@pytest.mark.parametrize(("case", "world_size"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_forward_and_greedy_tokens(case: Case, world_size: int, groups) -> None:
    model, inputs = case.make(), case.inputs()
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        want = model(**inputs)
        want_tokens = model.generate(**prompt, **GREEDY) if case.generates else None

    parallelize(model, workers=groups(world_size))
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


# On a short text BigBird changes its attention while it runs, and the whole model then gives no weights at all.
WITH_WEIGHTS = [case for case in CASES if case.name != "big-bird-short"]


@pytest.mark.parametrize("case", WITH_WEIGHTS, ids=lambda case: case.name)
def test_attention_weights_of_all_heads(case: Case, groups) -> None:
    model, inputs = case.make(), case.inputs()
    model.set_attn_implementation("eager")  # the one that gives them
    options = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        want = model(**inputs, **options)
    with parallelize(model, workers=groups(2)):
        got = model(**inputs, **options)
    for name in want:
        if "attentions" in name or "hidden_states" in name:
            assert_close(got[name], want[name])


def assert_close(got: object, want: object) -> None:
    """Tensors within 1e-4 of the largest, in nested tuples of equal shape."""
    assert type(got) is type(want)
    if isinstance(want, tuple):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert_close(mine, theirs)
    elif isinstance(want, torch.Tensor):
        assert got.shape == want.shape
        assert largest_difference(got, want) <= 1e-4
