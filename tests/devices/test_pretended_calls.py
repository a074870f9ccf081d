"""Tests inputs and outputs of calls on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import await_incarnation, kill
from tests.pretend_cuda.caller import small
from tests.pretend_cuda.objects import Draws, EndsAt, Favours
from tests.zoo.build import largest_difference
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.seq2seq import t5

GREEDY = {"max_new_tokens": 2, "do_sample": False}


def test_encoder_outputs(pretended_one: WorkerGroup) -> None:
    whole, inputs = t5(), seq2seq_inputs()
    with torch.no_grad():
        states = whole.encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    decoded = {"decoder_input_ids": inputs["decoder_input_ids"]}
    with parallelize(t5(), workers=pretended_one) as model:
        for outputs in ((states,), BaseModelOutput(states)):
            encoded = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}
            assert largest_difference(model(**encoded, **decoded).logits, whole(**encoded, **decoded).logits) <= 1e-4
        assert torch.equal(model.generate(**encoded, **GREEDY), whole.generate(**encoded, **GREEDY))


def test_objects_that_hold_tensors(pretended_one: WorkerGroup) -> None:
    bias = torch.randn(131, generator=torch.Generator().manual_seed(5)) * 3
    whole = small()
    mine, theirs = Favours(bias), Favours(bias)
    want = whole.generate(**text_inputs(), logits_processor=[mine], **GREEDY)
    ends = EndsAt(want[0, 8:9])
    with parallelize(small(), workers=pretended_one) as model:
        assert torch.equal(model.generate(**text_inputs(), logits_processor=[theirs], **GREEDY), want)
        assert len(theirs.sums) == len(mine.sums)
        assert {theirs.total.device.type, theirs.sums[0].device.type} == {"cpu"}
        assert largest_difference(theirs.total, mine.total) <= 1e-4
        assert torch.equal(
            model.generate(**text_inputs(), stopping_criteria=[ends], **GREEDY),
            whole.generate(**text_inputs(), stopping_criteria=[ends], **GREEDY),
        )


@pytest.mark.slow
def test_an_object_with_a_generator(pretended_one: WorkerGroup) -> None:
    want = small().generate(**text_inputs(), logits_processor=[Draws()], **GREEDY)
    with parallelize(small(), workers=pretended_one) as model:
        assert torch.equal(model.generate(**text_inputs(), logits_processor=[Draws()], **GREEDY), want)


@pytest.mark.slow
def test_caches_of_the_caller(pretended_one: WorkerGroup) -> None:
    whole, ids = small(), text_inputs()["input_ids"]
    filled, mine = DynamicCache(), DynamicCache()
    with torch.no_grad():
        whole(input_ids=ids, past_key_values=filled)
        whole(input_ids=ids, past_key_values=mine)
        want = whole(input_ids=ids[:, :1], past_key_values=filled).logits
    with parallelize(small(), workers=pretended_one) as model:
        output = model(input_ids=ids, use_cache=True)
        got = model(input_ids=ids[:, :1], past_key_values=output.past_key_values).logits
        assert largest_difference(got, want) <= 1e-4
        output.past_key_values.reorder_cache(torch.tensor([1, 0]))
        swapped = model(input_ids=ids[:, :1].flip(0), past_key_values=output.past_key_values).logits
        assert swapped.isfinite().all()


@pytest.mark.slow
def test_sampling_follows_the_callers_stream(pretended_one: WorkerGroup) -> None:
    with parallelize(small(), workers=pretended_one) as model:
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            drawn.append(model.generate(**text_inputs(), max_new_tokens=3, do_sample=True))
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])


def test_autocast_is_that_of_the_devices(pretended_one: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    with parallelize(small(), workers=pretended_one) as model:
        with torch.autocast("cuda", torch.bfloat16):
            assert model(**text_inputs()).logits.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert model(**text_inputs()).logits.dtype == torch.float32


def test_defaults_of_the_caller(pretended_one: WorkerGroup) -> None:
    want = small().generate(**text_inputs(), **GREEDY)
    inputs, processor = text_inputs(), Favours(torch.zeros(131))
    model = parallelize(small(), workers=pretended_one)
    before = torch.get_default_dtype()
    try:
        torch.set_default_device("meta")  # stands for any device but the host
        assert torch.equal(model.generate(**inputs, logits_processor=[processor], **GREEDY), want)
        assert model(**inputs, use_cache=True).logits.device.type == "cpu"
        torch.set_default_dtype(torch.float64)
        model.generate(**inputs, max_new_tokens=2, do_sample=True, seed=3)
        torch.set_default_device(None)
        assert torch.equal(model.generate(**inputs, logits_processor=[processor], **GREEDY), want)
        torch.set_default_device("meta")
        state = model.state_dict()
        model.deparallelize()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    assert torch.equal(model.generate(**inputs, **GREEDY), want)


@pytest.mark.slow
def test_from_a_path_saved_and_restarted(tmp_path: Any, pretended_one: WorkerGroup) -> None:
    whole = small()
    whole.save_pretrained(tmp_path / "model")
    want = whole.generate(**text_inputs(), **GREEDY)
    with parallelize(tmp_path / "model", 2, workers={"device": "cuda"}) as model:
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), want)
        kill(deployment_of(model).pids[1])
        await_incarnation(model, 1)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), want)
        model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_static_cache_is_no_wish_to_compile(pretended: WorkerGroup) -> None:
    whole = small()
    want = whole.generate(**text_inputs(), **GREEDY)
    with parallelize(small(), workers=pretended) as model:
        assert torch.equal(model.generate(**text_inputs(), cache_implementation="static", **GREEDY), want)
        with pytest.raises(ParallelError, match="mode is 'reduce-overhead', which makes CUDA graphs"):
            model.generate(**text_inputs(), compile_config=CompileConfig(mode="reduce-overhead"), **GREEDY)
        model.generation_config.cache_implementation = "static"
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), want)


def test_memory_goes_back(pretended_one: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller frees its device memory, and the ranks free a model that is no longer used."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with parallelize(small(), workers=pretended_one) as model:
        assert emptied
        assert pretended_one.call("allocated") > 0
        del model
    assert pretended_one.call("emptied")[-1] == 0
