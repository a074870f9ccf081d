"""Tests that models whose ids have codebooks generate the tokens of the whole model, with heads that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup

SMALL = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 5}
T5 = {"vocab_size": 50, "d_model": 40, "d_kv": 8, "d_ff": 70, "num_layers": 2, "num_heads": 5}
CODEC = {
    "audio_channels": 1, "num_filters": 4, "hidden_size": 8, "num_residual_layers": 1, "upsampling_ratios": [2, 2],
    "codebook_size": 64, "codebook_dim": 8, "sampling_rate": 16, "target_bandwidths": [0.1], "num_lstm_layers": 1,
}  # fmt: skip
MIMI = {
    "hidden_size": 8, "num_filters": 4, "num_residual_layers": 1, "upsampling_ratios": [2], "codebook_size": 64,
    "codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 4, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8, "frame_rate": 4.0,
    "sampling_rate": 16, "upsample_groups": 8,
}  # fmt: skip


def csm() -> PreTrainedModel:
    gated = {**SMALL, "head_dim": 8, "intermediate_size": 74, "num_codebooks": 4, "vocab_size": 40}
    depth = {**gated, "num_key_value_heads": 5, "backbone_hidden_size": 40}
    config = tf.CsmConfig(
        **gated, num_key_value_heads=5, text_vocab_size=50, depth_decoder_config=depth, codec_config=MIMI,
        codebook_eos_token_id=38, codebook_pad_token_id=39, pad_token_id=49, eos_token_id=None, bos_token_id=1,
        audio_token_id=48, audio_eos_token_id=47,
    )  # fmt: skip
    return tf.CsmForConditionalGeneration(config)


def dia() -> PreTrainedModel:
    encoder = {**SMALL, "vocab_size": 50, "num_key_value_heads": 5, "head_dim": 8, "intermediate_size": 74}
    decoder = {
        **encoder, "vocab_size": 40, "num_channels": 3, "num_key_value_heads": 1, "cross_num_attention_heads": 5,
        "cross_num_key_value_heads": 5, "cross_head_dim": 8, "cross_hidden_size": 40,
    }  # fmt: skip
    config = tf.DiaConfig(
        encoder_config=encoder, decoder_config=decoder, delay_pattern=[0, 1, 2], pad_token_id=37, eos_token_id=36,
        bos_token_id=38,
    )  # fmt: skip
    return tf.DiaForConditionalGeneration(config)


def _musicgen(config: type[Any], model: type[PreTrainedModel], **decoder: Any) -> PreTrainedModel:
    decoder = {
        **SMALL, "vocab_size": 40, "ffn_dim": 74, "num_codebooks": 4, "pad_token_id": 40, "bos_token_id": 40,
        "max_position_embeddings": 64, "model_type": decoder.pop("kind"), **decoder,
    }  # fmt: skip
    text, audio = {"model_type": "t5", **T5}, {"model_type": "encodec", **CODEC}
    return model(config(text_encoder=text, audio_encoder=audio, decoder=decoder))


def musicgen() -> PreTrainedModel:
    return _musicgen(tf.MusicgenConfig, tf.MusicgenForConditionalGeneration, kind="musicgen_decoder")


def musicgen_melody() -> PreTrainedModel:
    return _musicgen(tf.MusicgenMelodyConfig, tf.MusicgenMelodyForConditionalGeneration, kind="musicgen_melody_decoder")


MODELS = {"csm": csm, "dia": dia, "musicgen": musicgen, "musicgen_melody": musicgen_melody}


@pytest.mark.parametrize("name", [pytest.param("csm", marks=pytest.mark.slow), "dia", "musicgen", "musicgen_melody"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_codes_of_generate(name: str, ranks: int, groups: Callable[[int], WorkerGroup]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(3, 36, (2, 6))
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)  # so that the codes differ from each other
    ways = [{"do_sample": False}, {"do_sample": True}]

    def codes_of(way: dict[str, Any]) -> Any:
        torch.manual_seed(7)
        return model.generate(ids, **way, max_new_tokens=6)

    wanted = [codes_of(way) for way in ways]
    assert len(wanted[0].unique()) > 3
    parallelize(model, workers=groups(ranks))
    try:
        for way, codes in zip(ways, wanted, strict=True):
            torch.testing.assert_close(codes_of(way), codes, rtol=1e-4, atol=1e-4)
    finally:
        model.deparallelize()
