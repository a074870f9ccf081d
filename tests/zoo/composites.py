"""Makes tiny encoder-decoders that are not in `seq2seq.py`, decoders of 2018 to 2020, and models composed of other
models."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, image_inputs, seq2seq_inputs, text_inputs, token_ids
from tests.zoo.classics import global_inputs, long_inputs
from tests.zoo.decoders import SPECIAL_IDS
from tests.zoo.seq2seq import bart
from tests.zoo.vision_audio import IMAGES, TOWER, sound_inputs

DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 58, "max_position_embeddings": 64, "is_decoder": True, "add_cross_attention": True,
}  # fmt: skip
START = {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}


def ctrl(heads: int = 6) -> PreTrainedModel:
    config = tf.CTRLConfig(
        vocab_size=VOCABULARY, n_positions=64, n_embd=8 * heads, dff=74, n_layer=2, n_head=heads, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.CTRLLMHeadModel, config)


def openai_gpt(heads: int = 6) -> PreTrainedModel:
    config = tf.OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_positions=64, n_embd=8 * heads, n_layer=2, n_head=heads, **SPECIAL_IDS
    )
    return build(tf.OpenAIGPTLMHeadModel, config, attention="eager")


def xlm(family: str = "XLM", head: str = "WithLMHeadModel", heads: int = 6, **options: Any) -> PreTrainedModel:
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, emb_dim=8 * heads, n_layers=2, n_heads=heads, max_position_embeddings=64, n_langs=3,
        pad_index=0, eos_index=2, **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(getattr(tf, family + head), config, attention="eager")


def fsmt() -> PreTrainedModel:
    """Return a model whose encoder and decoder differ in vocabulary, number of heads and width."""
    config = tf.FSMTConfig(
        langs=["en", "de"], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY - 30, d_model=48, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=4, encoder_ffn_dim=74, decoder_ffn_dim=70,
        max_position_embeddings=32, forced_eos_token_id=None, decoder_start_token_id=2, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.FSMTForConditionalGeneration, config, attention="eager")


def fsmt_inputs() -> dict[str, Any]:
    return {**seq2seq_inputs(), "decoder_input_ids": token_ids(length=4, seed=2) % 100}


def funnel(head: str = "ForMaskedLM", heads: int = 6, **options: Any) -> PreTrainedModel:
    config = tf.FunnelConfig(
        vocab_size=VOCABULARY, block_sizes=[1, 2], num_decoder_layers=1, d_model=44, n_head=heads, d_head=8, d_inner=74,
        **options,
    )  # fmt: skip
    return build(getattr(tf, "Funnel" + head), config, attention="eager")


def funnel_inputs() -> dict[str, Any]:
    return {**text_inputs(), "token_type_ids": torch.tensor([[2, 0, 0, 0, 1, 1, 1]] * 2)}


def reformer(head: str = "ModelWithLMHead", heads: int = 6, **options: Any) -> PreTrainedModel:
    """Return a model whose layers attend, in turn, to chunks and to hash buckets."""
    settings = {
        "attn_layers": ["local", "lsh"], "hash_seed": 3, "is_decoder": True, "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 4, "num_buckets": 4, "num_hashes": 2, **options,
    }  # fmt: skip
    config = tf.ReformerConfig(
        vocab_size=VOCABULARY, hidden_size=44, num_attention_heads=heads, attention_head_size=8, feed_forward_size=74,
        axial_pos_shape=(4, 5), axial_pos_embds_dim=(14, 30), max_position_embeddings=20, pad_token_id=0,
        eos_token_id=2, **settings,
    )  # fmt: skip
    return build(getattr(tf, "Reformer" + head), config, attention="eager")


def reformer_inputs() -> dict[str, Any]:
    return {"input_ids": token_ids(length=12)}


def speech_to_text() -> PreTrainedModel:
    config = tf.Speech2TextConfig(
        vocab_size=VOCABULARY, input_feat_per_channel=16, d_model=48, encoder_layers=2, decoder_layers=2,
        num_conv_layers=2, conv_kernel_sizes=(3, 3), conv_channels=20, encoder_attention_heads=6,
        decoder_attention_heads=4, encoder_ffn_dim=74, decoder_ffn_dim=70, max_source_positions=40,
        max_target_positions=32, decoder_start_token_id=2, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.Speech2TextForConditionalGeneration, config, attention="eager")


def filterbank_inputs() -> dict[str, Any]:
    features = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(4))
    return {"input_features": features, "decoder_input_ids": token_ids(length=4, seed=2)}


def led() -> PreTrainedModel:
    positions = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
    return bart("LED", attention="eager", attention_window=[4, 6], **positions)


def led_inputs() -> dict[str, Any]:
    return {**global_inputs(), "decoder_input_ids": token_ids(length=4, seed=2)}


def bigbird_pegasus(**options: Any) -> PreTrainedModel:
    settings = {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 64, **options}
    return bart("BigBirdPegasus", attention="eager", **settings)


def long_seq2seq_inputs() -> dict[str, Any]:
    return {**long_inputs(), "decoder_input_ids": token_ids(length=4, seed=2)}


def prophetnet() -> PreTrainedModel:
    config = tf.ProphetNetConfig(
        vocab_size=VOCABULARY, hidden_size=48, encoder_ffn_dim=74, num_encoder_layers=2, num_encoder_attention_heads=6,
        decoder_ffn_dim=70, num_decoder_layers=2, num_decoder_attention_heads=4, max_position_embeddings=32, ngram=2,
        num_buckets=8, relative_max_distance=16, decoder_start_token_id=1, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.ProphetNetForConditionalGeneration, config, attention="eager")


def mt5(family: str = "MT5") -> PreTrainedModel:
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, d_model=40, d_kv=8, d_ff=74, num_layers=2, num_heads=6, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return build(getattr(tf, f"{family}ForConditionalGeneration"), config)


def encoder_decoder() -> PreTrainedModel:
    """Return a BERT followed by a narrower BERT."""
    encoder = tf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **TOWER)
    config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, tf.BertConfig(**DECODER), **START)
    return build(tf.EncoderDecoderModel, config)


def vision_encoder_decoder() -> PreTrainedModel:
    """Return a DeiT followed by a GPT-2 with cross-attention."""
    decoder = tf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True, **SPECIAL_IDS
    )
    encoder = tf.DeiTConfig(**TOWER, **IMAGES)
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **START)
    return build(tf.VisionEncoderDecoderModel, config)


def speech_encoder_decoder() -> PreTrainedModel:
    """Return a Wav2Vec2 followed by a BERT."""
    encoder = tf.Wav2Vec2Config(
        vocab_size=VOCABULARY, conv_dim=(16, 20), conv_kernel=(10, 4), conv_stride=(5, 4), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, **TOWER,
    )  # fmt: skip
    config = tf.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, tf.BertConfig(**DECODER), **START)
    return build(tf.SpeechEncoderDecoderModel, config)


def rag(head: str = "Token") -> PreTrainedModel:
    """Return a DPR that encodes questions and a BART that answers; the caller has the retriever."""
    question = tf.DPRConfig(vocab_size=VOCABULARY, max_position_embeddings=64, projection_dim=22, **TOWER)
    generator = tf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=58, decoder_ffn_dim=58, max_position_embeddings=64,
        forced_eos_token_id=None, **START,
    )  # fmt: skip
    config = tf.RagConfig.from_question_encoder_generator_configs(question, generator, n_docs=2, **START)
    return build(getattr(tf, f"Rag{head}ForGeneration"), config)


def retrieved_inputs() -> dict[str, Any]:
    """Return two questions with two documents each."""
    return {
        "input_ids": token_ids(), "context_input_ids": token_ids(rows=4, length=9, seed=5),
        "context_attention_mask": torch.ones(4, 9, dtype=torch.long),
        "doc_scores": torch.tensor([[0.3, 1.0], [0.9, 0.1]]),
        "decoder_input_ids": token_ids(length=4, seed=2),
    }  # fmt: skip


def detr() -> PreTrainedModel:
    backbone = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], out_features=["stage2"], layer_type="basic"
    )
    config = tf.DetrConfig(
        backbone_config=backbone, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
        decoder_attention_heads=4, encoder_ffn_dim=74, decoder_ffn_dim=70, num_queries=5, num_labels=9,
    )  # fmt: skip
    return build(tf.DetrForObjectDetection, config, attention="eager")


def image_decoder_inputs() -> dict[str, Any]:
    return {**image_inputs(), "decoder_input_ids": token_ids(length=4, seed=2)}


def sound_decoder_inputs() -> dict[str, Any]:
    return {**sound_inputs(), "decoder_input_ids": token_ids(length=4, seed=2)}


CASES = [
    Case("ctrl", ctrl, text_inputs, generates=True),
    Case("openai-gpt", openai_gpt, text_inputs, generates=True),
    Case("xlm", xlm, text_inputs),
    Case("xlm-causal", lambda: xlm(causal=True), text_inputs, generates=True),
    Case("xlm-qa", lambda: xlm(head="ForQuestionAnsweringSimple"), text_inputs),
    Case("flaubert", lambda: xlm("Flaubert"), text_inputs),
    Case("fsmt", fsmt, fsmt_inputs, generates=True),
    Case("funnel", funnel, funnel_inputs),
    Case("funnel-factorized", lambda: funnel(attention_type="factorized"), funnel_inputs),
    Case("funnel-classifier", lambda: funnel("ForSequenceClassification", num_labels=5), funnel_inputs),
    Case("reformer", reformer, reformer_inputs, generates=True),
    Case("reformer-local", lambda: reformer("ForMaskedLM", attn_layers=["local"], is_decoder=False), reformer_inputs),
    Case("speech-to-text", speech_to_text, filterbank_inputs, generates=True),
    Case("led", led, led_inputs, generates=True),
    Case("bigbird-pegasus", lambda: bigbird_pegasus(), long_seq2seq_inputs, generates=True),
    Case("bigbird-pegasus-short", lambda: bigbird_pegasus(use_bias=True), seq2seq_inputs, generates=True),
    Case("prophetnet", prophetnet, seq2seq_inputs, generates=True),
    Case("mt5", mt5, seq2seq_inputs, generates=True),
    Case("encoder-decoder", encoder_decoder, seq2seq_inputs, generates=True),
    Case("vision-encoder-decoder", vision_encoder_decoder, image_decoder_inputs, generates=True),
    Case("speech-encoder-decoder", speech_encoder_decoder, sound_decoder_inputs, generates=True),
    Case("rag", rag, retrieved_inputs),
    Case("rag-sequence", lambda: rag("Sequence"), retrieved_inputs),
    Case("detr", detr, lambda: image_inputs(32)),
    Case("deit", lambda: build(tf.DeiTForImageClassification, tf.DeiTConfig(num_labels=5, **TOWER, **IMAGES)),
         image_inputs),
]  # fmt: skip
