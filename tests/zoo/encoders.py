"""Makes tiny text encoders; some of these models can also be decoders."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, text_inputs


def encoder(
    family: str, head: str = "ForMaskedLM", heads: int = 6, attention: str = "sdpa", **options: Any
) -> PreTrainedModel:
    """Return a BERT-shaped encoder of `family` ("Bert", "Roberta", …) under the head `head`."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 8 * heads, "num_hidden_layers": 2, "num_attention_heads": heads,
        "intermediate_size": 74, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    cls = getattr(tf, family + head)
    if not cls._supports_sdpa:  # LayoutLM, before transformers 5.23
        attention = "eager"
    return build(cls, getattr(tf, f"{family}Config")(**settings, **options), attention=attention)


def distilbert(head: str = "ForMaskedLM", heads: int = 6) -> PreTrainedModel:
    config = tf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=8 * heads, n_layers=2, n_heads=heads, hidden_dim=74, max_position_embeddings=64,
    )  # fmt: skip
    return build(getattr(tf, "DistilBert" + head), config)


def xlnet(head: str = "LMHeadModel", heads: int = 6, **options: Any) -> PreTrainedModel:
    config = tf.XLNetConfig(vocab_size=VOCABULARY, d_model=8 * heads, n_layer=2, n_head=heads, d_inner=74, **options)
    return build(getattr(tf, "XLNet" + head), config, attention="eager")


def segmented_inputs() -> dict[str, Any]:
    return {**text_inputs(), "token_type_ids": torch.tensor([[0, 0, 0, 0, 1, 1, 2]] * 2)}


DISENTANGLED = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "attention": "eager",
}  # fmt: skip
SHARED_KEYS = {"share_att_key": True, "position_buckets": 4, "conv_kernel_size": 3, "norm_rel_ebd": "layer_norm"}


CASES = [
    Case("bert", lambda: encoder("Bert"), text_inputs),
    Case("bert-causal", lambda: encoder("Bert", "LMHeadModel", is_decoder=True), text_inputs, generates=True),
    Case("bert-classifier", lambda: encoder("Bert", "ForSequenceClassification", num_labels=5), text_inputs),
    Case("roberta", lambda: encoder("Roberta"), text_inputs),
    Case("roberta-causal", lambda: encoder("Roberta", "ForCausalLM", is_decoder=True), text_inputs, generates=True),
    Case("roberta-untied", lambda: encoder("Roberta", tie_word_embeddings=False), text_inputs),
    Case("roberta-classifier", lambda: encoder("Roberta", "ForSequenceClassification", num_labels=5), text_inputs),
    Case("xlm-roberta", lambda: encoder("XLMRoberta"), text_inputs),
    Case("xlm-roberta-xl", lambda: encoder("XLMRobertaXL"), text_inputs),
    Case("camembert", lambda: encoder("Camembert"), text_inputs),
    Case("roberta-prelayernorm", lambda: encoder("RobertaPreLayerNorm"), text_inputs),
    Case("data2vec-text", lambda: encoder("Data2VecText"), text_inputs),
    Case("distilbert", distilbert, text_inputs),
    Case("distilbert-classifier", lambda: distilbert("ForSequenceClassification"), text_inputs),
    Case("electra", lambda: encoder("Electra", embedding_size=48), text_inputs),
    Case("electra-narrow", lambda: encoder("Electra", embedding_size=20), text_inputs),
    Case("electra-discriminator", lambda: encoder("Electra", "ForPreTraining", embedding_size=20), text_inputs),
    Case("electra-causal", lambda: encoder("Electra", "ForCausalLM", is_decoder=True), text_inputs, generates=True),
    Case("albert", lambda: encoder("Albert", embedding_size=20), text_inputs),
    Case("albert-classifier", lambda: encoder("Albert", "ForSequenceClassification", embedding_size=20), text_inputs),
    Case("mpnet", lambda: encoder("MPNet", attention="eager"), text_inputs),
    Case("mpnet-classifier", lambda: encoder("MPNet", "ForSequenceClassification", attention="eager"), text_inputs),
    Case("xlnet", xlnet, segmented_inputs),
    Case("xlnet-classifier", lambda: xlnet("ForSequenceClassification", num_labels=5), text_inputs),
    Case("deberta", lambda: encoder("Deberta", **DISENTANGLED), text_inputs),
    Case("deberta-absolute", lambda: encoder("Deberta", relative_attention=False, attention="eager"), text_inputs),
    Case("deberta-v2", lambda: encoder("DebertaV2", **DISENTANGLED), text_inputs),
    Case("deberta-v3", lambda: encoder("DebertaV2", **DISENTANGLED, **SHARED_KEYS), text_inputs),
    Case("deberta-classifier", lambda: encoder("Deberta", "ForSequenceClassification", **DISENTANGLED), text_inputs),
    Case("deberta-v2-qa", lambda: encoder("DebertaV2", "ForQuestionAnswering", **DISENTANGLED), text_inputs),
]
