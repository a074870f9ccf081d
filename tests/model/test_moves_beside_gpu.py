"""Tests that code that moves models does not move a parallelized model, even on a machine with a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, LogitsProcessor, pipeline

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import is_parallelized
from tests.model.test_behaviour import word_tokenizer
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.decoders import decoder, gpt2
from tests.zoo.encoders import encoder
from tests.zoo.seq2seq import t5


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call the machine claims to have a GPU."""

    def pretend() -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    return pretend


@pytest.fixture(scope="module")
def llama(groups) -> Iterator[Any]:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        yield model


class Suppressing(LogitsProcessor):
    """A processor that bans a token and cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([9]), float("-inf"))


TEXT = {"task": "text-generation", "max_new_tokens": 4, "do_sample": False}


def test_pipeline_does_not_move_to_the_gpu(llama, gpu) -> None:
    gpu()
    got = pipeline(model=llama, tokenizer=word_tokenizer(), **TEXT)("w9 w17")
    want = pipeline(model=decoder("Llama"), tokenizer=word_tokenizer(), device="cpu", **TEXT)("w9 w17")
    assert got == want
    assert is_parallelized(llama)


def test_pipeline_of_encoder_does_not_move_the_model(groups, gpu) -> None:
    options = {"task": "feature-extraction", "tokenizer": word_tokenizer()}
    want = pipeline(model=encoder("Bert", "Model"), device="cpu", **options)("w9 w17")
    model = parallelize(encoder("Bert", "Model"), workers=groups(2))
    gpu()
    got = pipeline(model=model, **options)("w9 w17")
    assert torch.allclose(torch.tensor(got), torch.tensor(want), atol=1e-4)
    assert is_parallelized(model)
    model.deparallelize()


def test_pipeline_with_a_device_is_refused(llama, gpu) -> None:
    gpu()
    with pytest.raises(ValueError, match="cannot be moved to a specific device"):
        pipeline(model=llama, tokenizer=word_tokenizer(), device=0, **TEXT)
    assert is_parallelized(llama)


@pytest.mark.parametrize("device", ["cpu", -1, torch.device("cpu")], ids=str)
def test_pipeline_for_the_cpu_works_without_gpu(llama, device) -> None:
    assert pipeline(model=llama, tokenizer=word_tokenizer(), device=device, **TEXT)("w9 w17")
    assert is_parallelized(llama)


@pytest.mark.parametrize("loop", ["workers", "here", "assistant"])
def test_encoder_decoder_generates_as_before_beside_gpu(groups, gpu, loop) -> None:
    model = parallelize(t5(), workers=groups(2))
    gpu()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    inputs = seq2seq_inputs()
    if loop == "assistant":
        inputs = {name: tensor[:1] for name, tensor in inputs.items()}
        options["assistant_model"] = t5()
    elif loop == "here":
        options["logits_processor"] = [Suppressing()]
    part = model.get_encoder()
    before = set(vars(part))
    want = t5().generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options), want)
    assert set(vars(part)) == before
    model.deparallelize()


def test_own_device_map_returns_at_the_end(groups, gpu, tmp_path) -> None:
    t5().save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    model.hf_device_map = {"": "cpu"}  # as after device_map="cpu"
    before = dict(vars(model))
    parallelize(model, workers=groups(2))
    gpu()
    assert set(model.hf_device_map.values()) == {torch.device("cpu")}
    with pytest.raises(ParallelError, match="setting hf_device_map"):
        model.hf_device_map = {"": 0}
    model.generate(**seq2seq_inputs(), max_new_tokens=2, logits_processor=[Suppressing()])
    model.deparallelize()
    assert vars(model).keys() - {"deparallelize"} == before.keys()
    assert model.hf_device_map == {"": "cpu"}


def test_device_marks_are_removed_at_the_end(groups) -> None:
    model = gpt2()
    before = [(module, set(vars(module))) for module in model.modules()]
    parallelize(model, workers=groups(2))
    model(**text_inputs())
    model.deparallelize()
    left = {"deparallelize"}  # `deparallelize` has no effect any more
    assert [(module, set(vars(module)) - left) for module in model.modules()] == before
    assert all(type(vars(module)[name]) is dict for module, _ in before for name in ("_modules", "_parameters"))
