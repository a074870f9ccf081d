"""Tests methods that generate with arguments that cannot be pickled: the generation loop runs in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor

from parallelformers_ng import parallelize
from parallelformers_ng.model.methods import generates
from parallelformers_ng.runtime.group import WorkerGroup
from tests.generation.test_generate import Locked
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder
from tests.zoo.vision_audio import spectrogram_inputs, whisper

Groups = Callable[[int], WorkerGroup]


def sound() -> dict[str, Any]:
    return {"input_features": spectrogram_inputs()["input_features"][:1], "max_new_tokens": 5, "do_sample": False}


def test_whisper_with_a_processor_that_cannot_cross(groups: Groups) -> None:
    mine, theirs = Locked(), Locked()
    want = whisper().generate(**sound(), logits_processor=[theirs])
    with parallelize(whisper(), workers=groups(2)) as model:
        assert torch.equal(model.generate(**sound(), logits_processor=[mine]), want)
    assert (mine.steps, mine.seen) == (theirs.steps, theirs.seen)


@pytest.mark.parametrize("cut", [True, False], ids=["an assistant cut too", "an assistant that is whole"])
def test_whisper_with_an_assistant(cut: bool, groups: Groups) -> None:
    want = whisper().generate(**sound(), assistant_model=whisper())
    assistant = whisper()
    with parallelize(whisper(), workers=groups(2)) as model:
        if cut:
            parallelize(assistant, workers=groups(2))
        assert torch.equal(model.generate(**sound(), assistant_model=assistant), want)
        if cut:
            assistant.deparallelize()


class Answering(LlamaForCausalLM):
    """A model with additional methods that generate."""

    def answer(self, processor: LogitsProcessor) -> torch.Tensor:
        return self._answer([processor])

    def _answer(self, processors: list[LogitsProcessor]) -> torch.Tensor:
        return self.generate(**text_inputs(), max_new_tokens=5, do_sample=False, logits_processor=processors)

    def score(self, lock: Any) -> torch.Tensor:
        return self(**text_inputs()).logits


def answering() -> Answering:
    model = decoder("Llama")
    model.__class__ = Answering
    return model


def test_a_method_of_the_users_that_generates(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = Locked(), Locked()
    want = answering().answer(theirs)
    with parallelize(answering(), workers=groups(2)) as model, caplog.at_level(logging.WARNING):
        assert torch.equal(model.answer(mine), want)
        assert mine.seen == theirs.seen
        assert "answer runs in this process" in caplog.text
        want = answering().score(threading.Lock())
        assert torch.allclose(model.score(threading.Lock()), want, atol=1e-4)
        assert "score runs in this process" in caplog.text


def test_which_methods_generate() -> None:
    assert generates(Answering, Answering.answer)
    assert not generates(Answering, Answering.score)
    assert generates(type(whisper()), type(whisper()).generate_with_fallback)
    assert not generates(type(whisper()), type(whisper()).detect_language)
