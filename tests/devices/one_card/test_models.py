"""Tests families of models on ranks that share one card over NCCL."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from parallelformers_ng import parallelize
from tests.devices.one_card.expected import greedy, without_ties
from tests.devices.one_card.place import Place, quick, slow
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs
from tests.zoo.decoders import GEMMA3, MIXTURE, decoder, gpt2
from tests.zoo.encoders import encoder
from tests.zoo.seq2seq import bart, t5

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: decoder("Llama"),
    "four-heads": lambda: decoder("Llama", heads=4, key_heads=2),
    "qwen3-moe": lambda: decoder("Qwen3Moe", **MIXTURE),
    "gpt2": gpt2,
    "gemma3": lambda: decoder("Gemma3Text", tied=True, **GEMMA3),
    "t5": t5,
    "bart": bart,
}
TOKENS = 12


def equals_plain(family: str, ranks: int, place: Place, decode: Any = "auto") -> None:
    """Assert equal tokens of three calls: the first ones record the steps that the last one replays."""
    inputs, want = without_ties(FAMILIES[family](), TOKENS)
    with parallelize(FAMILIES[family](), workers=place.group(ranks), decode=decode) as model:
        for _ in range(3):
            assert torch.equal(greedy(model, inputs, TOKENS), want)


@quick
@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("four-heads", 3)])
def test_decoder_equals_the_plain_model(family: str, ranks: int, place: Place) -> None:
    equals_plain(family, ranks, place)


@slow
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt2", "gemma3", "t5", "bart"])
def test_family_on_two_ranks_equals_plain(family: str, place: Place) -> None:
    equals_plain(family, 2, place)


@slow
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gpt2", "gemma3", "t5"])
def test_family_on_more_ranks_equals_plain(family: str, ranks: int, place: Place) -> None:
    equals_plain(family, ranks, place)


@slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_eager_steps_equal_the_plain_model(ranks: int, place: Place) -> None:
    equals_plain("llama", ranks, place, decode="eager")


@slow
def test_steps_are_captured_on_all_ranks(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A step without a graph would log a warning."""
    with caplog.at_level(logging.WARNING, "parallelformers_ng"):
        equals_plain("llama", 2, place, decode="cuda_graphs")
        equals_plain("gpt2", 3, place, decode="cuda_graphs")
    # Records of the ranks name kernels that are left out, and have loggers of their own.
    assert not [each.message for each in caplog.records if each.name == "parallelformers_ng"]


@slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_embeddings_equal_the_plain_model(ranks: int, place: Place) -> None:
    whole = encoder("Bert")
    with torch.no_grad():
        want = whole(**text_inputs())
    with parallelize(encoder("Bert"), workers=place.group(ranks)) as model:
        got = model(**text_inputs())
    assert largest_difference(got[0], want[0]) <= 1e-4


def _of_real_widths(family: str, is_real: bool) -> PreTrainedModel:
    """Return four layers of Llama 3 8B's or Qwen3 30B A3B's widths, in bf16, on the card; much less of it elsewhere."""
    torch.manual_seed(0)
    size = 32 if is_real else 1
    common = {"num_hidden_layers": 4, "vocab_size": 1000 * size, "head_dim": 128 if is_real else 8}
    if family == "llama":
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
        shape = {"hidden_size": 128 * size, "intermediate_size": 448 * size}
        make = lambda: LlamaForCausalLM(LlamaConfig(**common, **heads, **shape))  # noqa: E731
    else:
        heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
        shape = {"hidden_size": 64 * size, "moe_intermediate_size": 24 * size}
        experts = {"num_experts": 128 if is_real else 8, "num_experts_per_tok": 8 if is_real else 2}
        make = lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **heads, **shape, **experts))  # noqa: E731
    with torch.device("cuda" if is_real else "cpu"):
        return make().to(torch.bfloat16).eval()


@slow
@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("llama", 4), ("qwen3-moe", 2)])
def test_layers_of_real_widths(family: str, ranks: int, place: Place) -> None:
    """Random experts answer near ties of the router otherwise, so only most of their logits must be near."""
    whole = _of_real_widths(family, place.is_real)
    ids = torch.randint(3, 1000, (1, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = whole(ids.to(whole.device)).logits.float().cpu()
    with parallelize(whole, workers=place.group(ranks)) as model:
        got = model(ids).logits.float().cpu()
        first = greedy(model, {"input_ids": ids}, 8, eos_token_id=None, pad_token_id=0)
        assert torch.equal(greedy(model, {"input_ids": ids}, 8, eos_token_id=None, pad_token_id=0), first)
    off = (got - want).abs() / want.std()
    assert off.quantile(0.9, dim=-1).median() <= 0.2
    assert family != "llama" or off.max() <= 0.25
