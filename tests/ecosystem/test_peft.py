"""Tests that adding any kind of PEFT adapter to a parallelized model raises an error and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder

TARGETS = ["q_proj", "down_proj"]
CONFIGS: dict[str, Any] = {
    "lora": peft.LoraConfig(target_modules=TARGETS, r=4),
    "dora": peft.LoraConfig(target_modules=TARGETS, r=4, use_dora=True),
    "lora of the embeddings": peft.LoraConfig(target_modules=["embed_tokens"], r=4),
    "parameters": peft.LoraConfig(target_parameters=["model.layers.0.mlp.up_proj.weight"], target_modules=[], r=4),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "oft": peft.OFTConfig(target_modules=TARGETS, oft_block_size=0, r=2),
    "vera": peft.VeraConfig(target_modules=["q_proj"], r=4),
    "norms": peft.LNTuningConfig(target_modules=["norm"]),
}


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "get_peft_model": peft.get_peft_model,
    "inject": lambda model, config: peft.inject_adapter_in_model(config, model),
    "add_adapter": lambda model, config: model.add_adapter(config),
}


@pytest.fixture(scope="module")
def llama(groups) -> Iterator[Any]:
    """Yield a parallelized model, and check afterwards that the model is unchanged."""
    model = decoder("Llama")
    attributes = set(vars(model))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield parallelize(model, workers=groups(2))
    model.deparallelize()
    assert vars(model).keys() - {"deparallelize"} == attributes  # `deparallelize` has no effect any more
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_is_refused_and_nothing_is_changed(llama, name, way) -> None:
    if (way, name) == ("inject", "vera"):
        pytest.skip("PEFT does not inject VeRA")
    modules, want = list(llama.named_modules()), llama(**text_inputs()).logits
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        WAYS[way](llama, CONFIGS[name])
    assert list(llama.named_modules()) == modules
    assert torch.equal(llama(**text_inputs()).logits, want)


@pytest.mark.parametrize("config", [peft.PromptTuningConfig, peft.PrefixTuningConfig], ids=lambda cls: cls.__name__)
def test_soft_prompt_is_not_trained_or_is_refused(groups, config) -> None:
    def train(model: Any) -> None:
        prompted = peft.get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=3))
        prompted(**text_inputs(), labels=text_inputs()["input_ids"]).loss.backward()

    with parallelize(decoder("Llama"), workers=groups(2)) as model, pytest.raises(ParallelError):
        train(model)
