"""Tests options of `generate` and of the forward on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.generation.test_generate import FAMILIES, OPTIONS, assert_same
from tests.zoo.case import seq2seq_inputs, text_inputs

FORWARD: dict[str, dict[str, Any]] = {
    "shown": {"output_attentions": True, "output_hidden_states": True},
    "tuple": {"return_dict": False},
    "no-cache": {"use_cache": False},
    "labels": {"labels": text_inputs()["input_ids"]},
}


def both(model: Any, whole: Any, **options: Any) -> tuple[Any, Any]:
    """Return the tokens of both models. The device's stream of random numbers begins at the caller's state."""
    torch.manual_seed(11)
    seed = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    got = model.generate(**text_inputs(), **options)
    torch.manual_seed(seed)
    return got, whole.generate(**text_inputs(), **options)


def check_options(family: str, names: Any, group: WorkerGroup) -> None:
    whole, cut = FAMILIES[family](), FAMILIES[family]()
    for model in (whole, cut):
        model.set_attn_implementation("eager")  # the implementation that returns attention weights
    with parallelize(cut, workers=group) as model:
        for name in names:
            limit = {} if "generation_config" in OPTIONS[name] else {"max_new_tokens": 3}
            assert_same(*both(model, whole, **limit, **OPTIONS[name]))


def test_the_most_telling_option_of_generate(pretended_one: WorkerGroup) -> None:
    check_options("llama", ["beams-early"], pretended_one)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("gpt2", 4), ("t5", 1), ("llama", 2)])
def test_all_options_of_generate(family: str, count: int, pretended_groups: Callable[[int], WorkerGroup]) -> None:
    check_options(family, OPTIONS, pretended_groups(count))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("gpt2", 4), ("t5", 1), ("llama", 2)])
def test_options_of_the_forward(family: str, count: int, pretended_groups: Callable[[int], WorkerGroup]) -> None:
    pretended = pretended_groups(count)
    whole, cut = FAMILIES[family](), FAMILIES[family]()
    for model in (whole, cut):
        model.set_attn_implementation("eager")
    with parallelize(cut, workers=pretended) as model, torch.no_grad():
        for options in FORWARD.values():
            inputs = seq2seq_inputs() if family == "t5" else text_inputs()
            if "labels" in options:
                inputs.pop("decoder_input_ids", None)
            got, want = model(**inputs, **options), whole(**inputs, **options)
            if isinstance(want, tuple):
                got, want = ([part for part in parts if isinstance(part, torch.Tensor)] for parts in (got, want))
            assert_same(got, want)
