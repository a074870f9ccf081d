"""Tests that a second call of `deparallelize` does nothing, also if the model has changed since the first call."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch
import transformers as tf

from parallelformers_ng import ParallelError, parallelize, plan
from tests.zoo.build import build


def tiny() -> tf.PreTrainedModel:
    config = tf.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return build(tf.LlamaForCausalLM, config)


def ended(groups) -> tf.PreTrainedModel:
    model = parallelize(tiny(), workers=groups(2))
    assert model.deparallelize() is model
    return model


def test_second_deparallelize_does_nothing(groups):
    model = ended(groups)
    assert model.deparallelize() is model
    assert type(model) is tf.LlamaForCausalLM


def test_with_block_accepts_a_deparallelized_model(groups):
    with parallelize(tiny(), workers=groups(2)) as model:
        model.deparallelize()
    assert type(model) is tf.LlamaForCausalLM


def test_model_can_be_parallelized_again(groups):
    model = ended(groups)
    parallelize(model, workers=groups(2))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert repr(model).startswith("LlamaForCausalLM(parallelized over 2")
    model.deparallelize()
    assert "parallelized" not in repr(model)


def test_copies_deparallelize_to_themselves(groups):
    model = ended(groups)
    other = copy.deepcopy(model)
    assert other.deparallelize() is other is not model


def test_saved_model_loads_without_this_library(groups, tmp_path):
    model, file = ended(groups), tmp_path / "model.pt"
    torch.save(model, file)
    code = f"""
import sys, torch
sys.modules["parallelformers_ng"] = None
model = torch.load({str(file)!r}, weights_only=False)
assert model.deparallelize() is model
assert set(model.state_dict()) == set(torch.load({str(file)!r}, weights_only=False).state_dict())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    loaded = torch.load(io.BytesIO(file.read_bytes()), weights_only=False)
    parallelize(loaded, workers=groups(2))
    assert loaded.deparallelize() is loaded
    assert "parallelized" not in repr(loaded)


@pytest.mark.parametrize("switch", ["fp16", "prove", "progress"])
@pytest.mark.parametrize("value", ["no", "true", 1, None])
def test_a_switch_takes_true_or_false(groups, switch, value):
    with pytest.raises(ParallelError, match=f"{switch} is {value!r}; it takes True or False"):
        parallelize(tiny(), workers=groups(2), **{switch: value})


def test_plans_refuse_wrong_switches_too():
    with pytest.raises(ParallelError, match="fp16 is 'no'"):
        plan(tiny(), 2, fp16="no")
    assert plan(tiny(), 2, fp16=True).bytes_whole < plan(tiny(), 2, fp16=False).bytes_whole
