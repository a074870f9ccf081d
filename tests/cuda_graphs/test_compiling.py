"""Tests that `parallelize(decode="compile")` gives the same tokens, or names the reason why it does not compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig

from parallelformers_ng import parallelize
from parallelformers_ng.cuda_graphs.modes import StaticSteps, static_generation, static_steps
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.runtime.group import WorkerGroup
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder, gpt2

TRACED = CompileConfig(
    backend="eager", mode=None, fullgraph=True
)  # one graph of the whole step, run without a compiler
COMPILED = StaticSteps({"compile_config": TRACED}, "generate runs without compiled steps")
HOW: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12}


@pytest.fixture
def group_of_two(groups: Callable[[int], WorkerGroup]) -> WorkerGroup:
    return groups(2)


def test_the_same_tokens_as_whole(group_of_two: WorkerGroup) -> None:
    """`fullgraph` raises if anything in the step, such as a parallel layer, cannot be compiled."""
    whole, inputs = decoder("Llama"), text_inputs()
    ways: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": False, "num_beams": 3}]
    with parallelize(decoder("Llama"), workers=group_of_two, decode=TRACED) as model:
        for way in ways:
            want = whole.generate(**inputs, **HOW, **way)
            assert torch.equal(model.generate(**inputs, **HOW, **way), want)
        torch.manual_seed(3)
        want = whole.generate(**inputs, **HOW, do_sample=True)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**inputs, **HOW, do_sample=True), want)
        answer = model.generate(**inputs, **HOW, do_sample=False, return_dict_in_generate=True)
        assert answer.past_key_values.is_compileable


def test_the_steps_do_reach_the_compiler(group_of_two: WorkerGroup) -> None:
    nowhere = CompileConfig(backend="no such compiler")
    with (
        parallelize(decoder("Llama"), workers=group_of_two, decode=nowhere) as model,
        pytest.raises(Exception, match="no such compiler"),
    ):
        model.generate(**text_inputs(), **HOW)


def test_uncompilable_call_runs_eagerly_and_warns_once(
    group_of_two: WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, want = text_inputs(), decoder("Llama").generate(**text_inputs(), **HOW, do_sample=False)
    with parallelize(decoder("Llama"), workers=group_of_two, decode=TRACED) as model, caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            assert torch.equal(model.generate(**inputs, **HOW, do_sample=False, past_key_values=cache), want)
    said = [record.message for record in caplog.records if "compiled" in record.message]
    assert said == ["generate runs without compiled steps: the caller's cache is used"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"generation_config": GenerationConfig()}, ""),
        ({"cache_implementation": "static"}, ""),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"generation_config": GenerationConfig(cache_implementation="quantized")}, "'quantized'"),
        ({"use_cache": False}, "use_cache is False"),
        ({"generation_config": GenerationConfig(disable_compile=True)}, "disable_compile"),
        ({"prompt_lookup_num_tokens": 3}, "assisted decoding"),
    ],
    ids=str,
)
def test_compilable_calls_get_a_static_cache(arguments: dict[str, Any], reason: str) -> None:
    changed, why = static_generation(decoder("Llama"), arguments, COMPILED)
    assert bool(why) is bool(reason)
    assert reason in why
    assert changed == (
        arguments if reason else {"cache_implementation": "static", "compile_config": TRACED, **arguments}
    )


def test_a_model_that_transformers_does_not_compile() -> None:
    model = gpt2()
    type(model)._can_compile_fullgraph, before = False, type(model)._can_compile_fullgraph
    try:
        assert "cannot compile a step of GPT2LMHeadModel" in static_generation(model, {}, COMPILED)[1]
    finally:
        type(model)._can_compile_fullgraph = before


def test_compile_config_depends_on_device_and_ranks() -> None:
    def config(decode: Any, device: str, world_size: int) -> CompileConfig:
        steps, why = static_steps(decode, device, world_size)
        assert steps is not None
        assert not why
        return steps.options["compile_config"]

    assert static_steps("auto", "cpu", 1) == static_steps("eager", "cuda", 1) == (None, "")
    assert config("compile", "cuda", 1).mode == "reduce-overhead"
    assert config("compile", "cuda", 2).mode == config("compile", "cpu", 1).mode == "default"
    assert config(TRACED, "cpu", 2).fullgraph
    with pytest.raises(ParallelError, match="decode is 'max'; it takes 'auto', 'eager'"):
        parallelize(decoder("Llama"), 2, workers={"device": "cpu"}, decode="max")


def test_several_ranks_compile_without_graphs() -> None:
    for config in (
        CompileConfig(mode="reduce-overhead"),
        CompileConfig(mode=None, options={"triton.cudagraphs": True}),
    ):
        with pytest.raises(ParallelError, match=r"supports one rank, but the model has 2 ranks\. Pass"):
            static_steps(config, "cuda", 2)
        assert static_steps(config, "cuda", 1)[0]
        assert static_steps(config, "cpu", 2)[0]
