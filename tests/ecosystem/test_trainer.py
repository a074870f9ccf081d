"""Tests transformers' Trainer and accelerate: evaluation works as with a whole model, and training raises an error."""

from __future__ import annotations

from typing import Any

import accelerate
import numpy
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import is_parallelized
from tests.zoo.case import token_ids
from tests.zoo.decoders import decoder
from tests.zoo.encoders import encoder
from tests.zoo.seq2seq import t5

MODELS = {
    "llama": lambda: decoder("Llama", tied=True),
    "bert": lambda: encoder("Bert", "ForSequenceClassification"),
    "t5": t5,
}


def rows(model: Any) -> Dataset:
    ids = token_ids(rows=5, length=6).tolist()
    labels = [0, 1, 1, 0, 1] if "Classification" in type(model).__name__ else ids
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def trainer(model: Any, directory: Any, **settings: Any) -> Trainer:
    options = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "per_device_eval_batch_size": 2}
    return Trainer(model, TrainingArguments(str(directory), **options, **settings), train_dataset=rows(model))


def both(name: str, groups: Any, directory: Any, gpu: Any, **settings: Any) -> None:
    whole, model = MODELS[name](), MODELS[name]()
    if gpu is not None:
        gpu()  # before parallelize: later code is frozen, and the pretended GPU replaces a method of tensors
    parallelize(model, workers=groups(2))
    before = trainer(whole, directory, use_cpu=True, **settings)
    want, metrics = before.predict(rows(whole)), before.evaluate(rows(whole))
    after = trainer(model, directory, **settings)
    got = after.predict(rows(model))
    for mine, theirs in zip(flat(got.predictions), flat(want.predictions), strict=True):
        numpy.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert after.evaluate(rows(model))["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-4)
    assert is_parallelized(model)
    model.deparallelize()
    assert vars(model).keys() - {"deparallelize"} == vars(whole).keys()  # `deparallelize` has no effect any more


def flat(predictions: Any) -> list[numpy.ndarray]:
    return [predictions] if isinstance(predictions, numpy.ndarray) else [a for each in predictions for a in flat(each)]


@pytest.mark.parametrize("name", MODELS)
def test_predict_and_evaluate(name, groups, tmp_path) -> None:
    both(name, groups, tmp_path, None)


@pytest.mark.parametrize("name", MODELS)
def test_predict_and_evaluate_where_there_is_a_gpu(name, groups, tmp_path, gpu) -> None:
    both(name, groups, tmp_path, gpu)


def test_train_is_refused_in_words(groups, tmp_path) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        before = model.state_dict()
        with pytest.raises(ParallelError, match=r"does not support training.*deparallelize\(\) first"):
            trainer(model, tmp_path, max_steps=2).train()
        assert is_parallelized(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_accelerate_prepares_but_cannot_place_the_model(groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        want = model(input_ids=token_ids()).logits
        assert accelerate.Accelerator(cpu=True).prepare(model) is model
        assert torch.equal(model(input_ids=token_ids()).logits, want)
        with pytest.raises(ParallelError, match="setting hf_device_map"):
            accelerate.dispatch_model(model, {"": "cpu"})
        assert is_parallelized(model)
