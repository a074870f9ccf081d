"""Tests small copies of unusual configurations, and the messages of failed proofs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    FastSpeech2ConformerHifiGan,
    FastSpeech2ConformerHifiGanConfig,
    PretrainedConfig,
    SpeechT5Config,
    SpeechT5ForSpeechToText,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)

from parallelformers_ng import parallelize, plan
from parallelformers_ng.autopolicy import twin_making
from parallelformers_ng.autopolicy.rule_search import RuleSearch
from parallelformers_ng.autopolicy.shrink import shrink
from parallelformers_ng.batching import batch_proof as proof
from parallelformers_ng.errors import UnsupportedModelError
from tests.strangers.agreement import assert_agree, assert_agree_in_a_batch, prompt
from tests.zoo.build import build, largest_difference
from tests.zoo.decoders import decoder


@pytest.mark.parametrize("bins", [20, 36])
@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (SpeechT5HifiGan, SpeechT5HifiGanConfig),
        (FastSpeech2ConformerHifiGan, FastSpeech2ConformerHifiGanConfig),
    ],
)
def test_vocoders_with_few_bins(groups, cls: Any, config: Any, bins: int) -> None:
    whole, cut = (
        build(cls, config(model_in_dim=bins, upsample_initial_channel=32), attention="eager") for _ in range(2)
    )
    sound = torch.randn(30, bins, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = whole(sound)
    assert largest_difference(parallelize(cut, workers=groups(2))(sound), want) < 1e-4
    cut.deparallelize()


@pytest.mark.parametrize("heads", [2, 4])
def test_speech_with_attention_weights_asked_for(groups, heads: int) -> None:
    config = SpeechT5Config(
        hidden_size=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=8, decoder_ffn_dim=8, conv_dim=(32, 32, 32),
        conv_stride=(4, 4, 4), conv_kernel=(8, 8, 8), vocab_size=81, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, output_attentions=True,
    )  # fmt: skip
    whole, cut = (build(SpeechT5ForSpeechToText, config, attention="eager") for _ in range(2))
    numbers = torch.Generator().manual_seed(1)
    inputs = {
        "input_values": torch.randn(2, 1024, generator=numbers),
        "decoder_input_ids": torch.randint(3, 81, (2, 7), generator=numbers),
    }
    with torch.no_grad():
        want = whole(**inputs, output_attentions=True)
    got = parallelize(cut, workers=groups(2))(**inputs, output_attentions=True)
    assert largest_difference(got.logits, want.logits) < 1e-4
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for one, other in zip(got[name], want[name], strict=True):
            assert largest_difference(one, other) < 1e-4
    cut.deparallelize()


def test_transformers_of_timm_are_made_shallow() -> None:
    """The size of a timm transformer is part of its name. PE-Audio-Video has a timm transformer of 320M parameters."""
    config = PretrainedConfig()
    config.architecture, config.model_args = "vit_pe_core_large_patch14_336", {"drop_path_rate": 0.0}
    assert shrink(config).model_args == {"drop_path_rate": 0.0, "depth": 2}
    config.architecture, config.model_args = "resnet50", None
    assert shrink(config).model_args is None


def csm() -> Any:
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    depth = {**small, **heads, "backbone_hidden_size": 48, "vocab_size": 99}
    with torch.device("meta"):
        return CsmForConditionalGeneration(
            CsmConfig(**small, **heads, vocab_size=99, text_vocab_size=99, depth_decoder_config=depth)
        )


@pytest.mark.slow
def test_decoder_with_own_depth_runs_on_three_ranks() -> None:
    assert plan(csm(), 3).cut_share > 0.5


@pytest.mark.parametrize("place", ["observing", "searching"])
def test_failures_of_a_proof_are_reported(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise IndexError("index 7 is out of range")

    if place == "observing":
        monkeypatch.setattr(twin_making, "observe", fail)
    else:
        monkeypatch.setattr(RuleSearch, "choose", fail)
        monkeypatch.setattr("parallelformers_ng.autopolicy.trials.Trials.match", lambda *_, **__: False)
        monkeypatch.setattr(RuleSearch, "vocabulary_holds", lambda self: True)
    config = SpeechT5HifiGanConfig(model_in_dim=24 if place == "observing" else 28, upsample_initial_channel=32)
    with pytest.raises(UnsupportedModelError, match="IndexError: index 7 is out of range"):
        plan(SpeechT5HifiGan(config), 2)


@pytest.mark.parametrize("setting", ["output_attentions", "output_hidden_states"])
def test_batch_is_proven_despite_requested_outputs(setting: str) -> None:
    model = decoder("Llama", attention="eager")
    setattr(model.config, setting, True)
    model.generation_config.return_dict_in_generate = True
    setattr(model.generation_config, setting, True)
    assert proof.why_alone(model, in_chunks=True) == ""


def test_failed_batch_proof_makes_calls_run_alone(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise IndexError("index 7 is out of range")

    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=groups(2), batching=True)
    monkeypatch.setattr(proof, "make_twin", fail)
    assert_agree(cut, whole, prompt(5))
    assert_agree_in_a_batch(cut, whole, [prompt(5), prompt(7, seed=2)])
    cut.deparallelize()
