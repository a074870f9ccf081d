"""Tests that methods of the program's classes see whole weights, and that a class's own `save_pretrained` is used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from parallelformers_ng import parallelize
from tests.zoo.build import build

IDS = torch.tensor([[1, 5, 9, 33, 7, 48, 2]])
GAIN = 1.0


def tiny(cls: type = tf.LlamaForCausalLM) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return build(cls, tf.LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None))


class Reading(tf.LlamaForCausalLM):
    def head_norm(self) -> float:
        return self.lm_head.weight.norm().item()

    def twice(self) -> float:
        return 2 * self.head_norm()

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def head_width(self) -> int:
        return self.lm_head.out_features

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.get_input_embeddings().weight)

    def cast(self, ids: torch.Tensor) -> torch.Tensor:
        return self(input_ids=ids).logits.to(self.lm_head.weight.dtype)

    @functools.cached_property
    def half(self) -> float:
        return 0.5

    def forward(self, input_ids: Any = None, **others: Any) -> Any:
        output = super().forward(input_ids=input_ids, **others)
        output.logits = output.logits * GAIN * self.half
        return output

    def save_pretrained(self, save_directory: Any, **options: Any) -> str:
        super().save_pretrained(save_directory, **options)
        (Path(save_directory) / "notes.txt").write_text("of the class")
        return "saved"


@pytest.fixture(scope="module")
def reading(groups) -> Iterator[Any]:
    with torch.no_grad(), parallelize(tiny(Reading), workers=groups(2)) as model:
        yield model


CALLS: dict[str, Callable[[Any], Any]] = {
    "weight": lambda m: m.head_norm(),
    "weight in another method": lambda m: m.twice(),
    "number of weights": lambda m: m.count(),
    "width": lambda m: m.head_width(),
    "rows": lambda m: m.embedded(IDS),
    "data type": lambda m: m.cast(IDS),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_read_whole_weights(reading, name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.testing.assert_close(CALLS[name](reading), CALLS[name](tiny(Reading)))
    runs_here = "reads weights or widths" in caplog.text
    assert runs_here == (name != "data type")


def test_values_change_although_a_method_reads_weights(reading, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny(Reading)
    monkeypatch.setitem(globals(), "GAIN", -2.0)
    torch.testing.assert_close(reading(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    torch.testing.assert_close(reading(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)


def test_own_save_pretrained_is_the_classs(reading, tmp_path: Path) -> None:
    assert reading.save_pretrained(tmp_path) == "saved"
    assert (tmp_path / "notes.txt").read_text() == "of the class"
    saved = tf.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in tiny(Reading).state_dict().items():
        assert torch.equal(saved[name], weight), name
