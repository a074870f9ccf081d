"""Tests that models whose ids have codebooks generate the tokens of the whole model, with heads that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch.utils._pytree import tree_leaves
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


def moshi() -> PreTrainedModel:
    sizes = {**SMALL, "num_key_value_heads": 5, "head_dim": 8, "ffn_dim": 74, "num_codebooks": 4, "vocab_size": 40}
    depth = {**sizes, "max_position_embeddings": 16}
    return tf.MoshiForConditionalGeneration(
        tf.MoshiConfig(**sizes, depth_decoder_config=depth, audio_encoder_config=MIMI, max_position_embeddings=64)
    )


def bark() -> PreTrainedModel:
    """A model of three stages: 20 semantic codes, then two of four codebooks with 16 codes, then all four."""
    sizes = {"hidden_size": 40, "num_layers": 2, "num_heads": 5, "block_size": 64}
    vocabularies = [{"input_vocab_size": count, "output_vocab_size": count} for count in (44, 54, 17)]
    codec = {**CODEC, "model_type": "encodec", "codebook_size": 16, "target_bandwidths": [0.17]}
    semantic, coarse, fine = ({**sizes, **vocabulary} for vocabulary in vocabularies)
    config = tf.BarkConfig(
        semantic_config=semantic, coarse_acoustics_config=coarse, codec_config=codec,
        fine_acoustics_config={**fine, "n_codes_total": 4, "n_codes_given": 1},
    )  # fmt: skip
    model = tf.BarkModel(config)
    settings = model.generation_config
    settings.codebook_size = 16
    settings.semantic_config = {
        "semantic_vocab_size": 20, "semantic_pad_token": 20, "eos_token_id": 20, "text_encoding_offset": 5,
        "text_pad_token": 42, "semantic_infer_token": 43, "max_input_semantic_length": 6, "semantic_rate_hz": 4,
        "max_new_tokens": 6, "min_new_tokens": 6,
    }  # fmt: skip
    settings.coarse_acoustics_config = {
        "coarse_semantic_pad_token": 52, "coarse_infer_token": 53, "max_coarse_input_length": 12,
        "max_coarse_history": 20, "sliding_window_len": 8, "coarse_rate_hz": 4, "n_coarse_codebooks": 2,
    }  # fmt: skip
    settings.fine_acoustics_config = {"max_fine_history_length": 8, "max_fine_input_length": 16, "n_fine_codebooks": 4}
    return model


def higgs_audio() -> PreTrainedModel:
    sizes = {**SMALL, "head_dim": 8, "num_key_value_heads": 5, "intermediate_size": 74, "vocab_size": 50}
    config = tf.HiggsAudioV2Config(
        **sizes, num_codebooks=3, codebook_size=40, audio_token_id=40, audio_bos_token_id=41, audio_delay_token_id=42,
        audio_stream_bos_id=38, audio_stream_eos_id=39, pad_token_id=43, eos_token_id=44, bos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return tf.HiggsAudioV2ForConditionalGeneration(config)


def speech_to_text() -> PreTrainedModel:
    """A model that reads the four codes of each frame beside its last token."""
    sizes = {**SMALL, "head_dim": 8, "num_key_value_heads": 5, "ffn_dim": 74, "vocab_size": 50}
    config = tf.KyutaiSpeechToTextConfig(
        **sizes, codebook_vocab_size=65, num_codebooks=4, audio_bos_token_id=64, audio_pad_token_id=310, pad_token_id=3,
        bos_token_id=48, eos_token_id=None, codec_config=MIMI, max_position_embeddings=64, sliding_window=16,
    )  # fmt: skip
    return tf.KyutaiSpeechToTextForConditionalGeneration(config)


class Scheduler:
    """Steps of equal length, in the place of a scheduler of diffusers."""

    timesteps: Any = None

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.arange(num_inference_steps, 0, -1)

    def step(self, noise: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor) -> Any:
        return SimpleNamespace(prev_sample=sample - 0.1 * noise)


def vibevoice() -> PreTrainedModel:
    """A model without codebooks, whose tokens say when a diffusion makes the next piece of sound."""
    text = {**SMALL, "num_key_value_heads": 5, "intermediate_size": 74, "vocab_size": 50, "model_type": "qwen2"}
    sound = {"hidden_size": 8, "num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1], "kernel_size": 3}
    diffusion = {"num_hidden_layers": 1, "intermediate_size": 30, "frequency_embedding_size": 16}
    kind = "vibevoice_acoustic_tokenizer"
    config = tf.VibeVoiceConfig(
        text_config=text, audio_config={**sound, "model_type": kind}, diffusion_head_config=diffusion,
        semantic_model_config={**sound, "model_type": f"{kind}_encoder"}, pad_token_id=43, eos_token_id=44,
        audio_bos_token_id=45, audio_eos_token_id=46, audio_token_id=47,
    )  # fmt: skip
    return tf.VibeVoiceForConditionalGeneration(config)


MODELS = {
    "csm": csm, "dia": dia, "musicgen": musicgen, "musicgen_melody": musicgen_melody, "moshi": moshi, "bark": bark,
    "kyutai_speech_to_text": speech_to_text,
}  # fmt: skip
# transformers 5.17 may lack these types
MODELS |= {"higgs_audio_v2": higgs_audio} if hasattr(tf, "HiggsAudioV2Config") else {}
MODELS |= {"vibevoice": vibevoice} if hasattr(tf, "VibeVoiceConfig") else {}


SLOW = ("csm", "moshi", "bark", "kyutai_speech_to_text", "higgs_audio_v2", "vibevoice")
"""Names of models whose parallelization proves the policies of several parts."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
@pytest.mark.parametrize("ranks", [2, 3])
def test_codes_of_generate(name: str, ranks: int, groups: Callable[[int], WorkerGroup]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    options: dict[str, Any] = {} if name == "bark" else {"max_new_tokens": 6}  # Bark's stages have limits of their own
    ids = torch.randint(3, 36, (2, 6))
    prompt = [ids]
    if name == "kyutai_speech_to_text":
        prompt, options = [], {"input_values": torch.randn(2, 1, 64)}  # the tokens follow the frames of the sound
    if name == "vibevoice":
        options |= {"noise_scheduler": Scheduler(), "num_diffusion_steps": 3, "attention_mask": torch.ones_like(ids)}
    if name == "higgs_audio_v2":
        ids[:, -1] = 41  # the sound begins
    if name == "moshi":
        codes = {speaker: torch.randint(0, 60, (2, 4, 6)) for speaker in ("user_audio_codes", "moshi_audio_codes")}
        options |= {**codes, "return_audio_codes": True}
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)  # so that the codes differ from each other
    ways = [{"do_sample": False}, {"do_sample": True}]

    def codes_of(way: dict[str, Any]) -> list[torch.Tensor]:
        torch.manual_seed(7)
        output = model.generate(*prompt, **way, **options)
        return [each for each in tree_leaves(output) if each is not None]  # codes, text, sound

    wanted = [codes_of(way) for way in ways]
    assert all(len(each.unique()) > 3 for each in wanted[0])
    parallelize(model, workers=groups(ranks))
    try:
        for way, codes in zip(ways, wanted, strict=True):
            torch.testing.assert_close(codes_of(way), codes, rtol=1e-4, atol=1e-4)
    finally:
        model.deparallelize()
