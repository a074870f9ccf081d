"""Encoders over text, some of which can be decoders as well."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, text_inputs


def encoder(family: str, head: str = "ForMaskedLM", heads: int = 6, **options: Any) -> PreTrainedModel:
    """A BERT-shaped encoder of `family` ("Bert", "Roberta", …) under the head `head`."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 8 * heads, "num_hidden_layers": 2, "num_attention_heads": heads,
        "intermediate_size": 74, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    return build(getattr(tf, family + head), getattr(tf, f"{family}Config")(**settings, **options))


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
]
