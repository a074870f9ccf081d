"""Makes tiny text encoder-decoders."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, seq2seq_inputs, text_inputs


def t5(heads: int = 6, gated: bool = False, tied: bool = True) -> PreTrainedModel:
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=40, d_kv=8, d_ff=74, num_layers=2, num_heads=heads,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=tied,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return build(tf.T5ForConditionalGeneration, config)


def switch() -> PreTrainedModel:
    """Return a model with experts in every other layer; each token uses one expert.

    Encoder and decoder have equal depth: transformers makes caches with as many layers as the encoder has. With a
    deeper decoder (12 layers by default), neither T5 nor Switch generates even as a whole model.
    """
    config = tf.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=40, d_kv=8, d_ff=74, num_layers=2, num_decoder_layers=2, num_heads=6,
        num_experts=4, expert_capacity=16, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return build(tf.SwitchTransformersForConditionalGeneration, config, attention="eager")


def bart(
    family: str = "Bart", head: str = "ForConditionalGeneration", attention: str = "sdpa", **options: Any
) -> PreTrainedModel:
    """Return a BART-shaped model of `family` ("Bart", "Pegasus", …) whose encoder and decoder differ in heads and
    width."""
    settings = {
        "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 74, "decoder_ffn_dim": 70,
        "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None, **options,
    }  # fmt: skip
    config = getattr(tf, f"{family}Config")(**settings)
    return build(getattr(tf, family + head), config, attention=attention)


CASES = [
    Case("t5", t5, seq2seq_inputs, generates=True),
    Case("t5-gated-untied", lambda: t5(gated=True, tied=False), seq2seq_inputs, generates=True),
    Case("switch", switch, seq2seq_inputs, generates=True),
    Case("bart", bart, seq2seq_inputs, generates=True),
    Case("bart-untied", lambda: bart(tie_word_embeddings=False), seq2seq_inputs, generates=True),
    Case("bart-causal", lambda: bart("Bart", "ForCausalLM", is_encoder_decoder=False), text_inputs, generates=True),
    Case("mbart", lambda: bart("MBart", scale_embedding=True), seq2seq_inputs, generates=True),
    Case("pegasus", lambda: bart("Pegasus"), seq2seq_inputs, generates=True),
    Case("marian", lambda: bart("Marian", "MTModel", decoder_vocab_size=VOCABULARY), seq2seq_inputs, generates=True),
    Case("blenderbot", lambda: bart("Blenderbot"), seq2seq_inputs, generates=True),
    Case("blenderbot-small", lambda: bart("BlenderbotSmall"), seq2seq_inputs, generates=True),
    Case("m2m-100", lambda: bart("M2M100"), seq2seq_inputs, generates=True),
    Case("plbart", lambda: bart("PLBart"), seq2seq_inputs, generates=True),
]
