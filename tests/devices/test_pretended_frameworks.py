"""Tests frameworks around a model whose workers are on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import numpy
import pytest
import torch
from transformers import Trainer, TrainingArguments, pipeline

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import is_parallelized
from parallelformers_ng.runtime.group import WorkerGroup
from tests.model.test_behaviour import word_tokenizer
from tests.pretend_cuda.caller import small
from tests.zoo.build import largest_difference
from tests.zoo.case import token_ids
from tests.zoo.encoders import encoder


@pytest.fixture
def in_caller(pretended_one: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> WorkerGroup:
    """Make the devices visible in the caller, too, for frameworks that look for devices."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return pretended_one


def test_a_pipeline_that_generates(in_caller: WorkerGroup) -> None:
    options: dict[str, Any] = {"task": "text-generation", "tokenizer": word_tokenizer(), "max_new_tokens": 2}
    want = pipeline(model=small(), device="cpu", **options)("w9 w17", do_sample=False)
    with parallelize(small(), workers=in_caller) as model:
        assert pipeline(model=model, **options)("w9 w17", do_sample=False) == want
        with pytest.raises(ValueError, match="cannot be moved to a specific device"):
            pipeline(model=model, device=0, **options)
        assert is_parallelized(model)


def test_a_pipeline_of_an_encoder(in_caller: WorkerGroup) -> None:
    options: dict[str, Any] = {"task": "feature-extraction", "tokenizer": word_tokenizer()}
    want = pipeline(model=encoder("Bert", "Model"), device="cpu", **options)("w9 w17")
    with parallelize(encoder("Bert", "Model"), workers=in_caller) as model:
        got = pipeline(model=model, **options)("w9 w17")
        assert largest_difference(torch.tensor(got), torch.tensor(want)) <= 1e-4
        assert is_parallelized(model)


def trainer(model: Any, directory: Path) -> Trainer:
    options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    return Trainer(model, TrainingArguments(str(directory), per_device_eval_batch_size=3, max_steps=1, **options))


def test_trainer_evaluates_and_does_not_train(pretended_one: WorkerGroup, tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(rows=4, length=6).tolist()]
    want = trainer(small(), tmp_path).predict(rows)
    with parallelize(small(), workers=pretended_one) as model:
        got = trainer(model, tmp_path).predict(rows)
        numpy.testing.assert_allclose(got.predictions, want.predictions, rtol=1e-4, atol=1e-4)
        assert got.metrics["test_loss"] == pytest.approx(want.metrics["test_loss"], rel=1e-4)
        training = trainer(model, tmp_path)
        training.train_dataset = rows
        with pytest.raises(ParallelError, match=r"does not support training.*deparallelize\(\) first"):
            training.train()


def test_accelerate_does_not_move_the_model(pretended_one: WorkerGroup) -> None:
    with parallelize(small(), workers=pretended_one) as model:
        assert accelerate.Accelerator(cpu=True).prepare(model) is model
        with pytest.raises(ParallelError, match="setting hf_device_map"):
            accelerate.dispatch_model(model, {"": "cpu"})
        whole = small()(input_ids=token_ids()).logits
        assert largest_difference(model(input_ids=token_ids()).logits, whole) <= 1e-4
