"""Makes tiny encoders of 2018 to 2022 that are not in `encoders.py`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, text_inputs
from tests.zoo.encoders import encoder

CAUSAL = {"is_decoder": True, "bos_token_id": 1, "eos_token_id": 2}


def dpr() -> PreTrainedModel:
    config = tf.DPRConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=74,
        max_position_embeddings=64, projection_dim=22,
    )  # fmt: skip
    return build(tf.DPRQuestionEncoder, config)


def lxmert() -> PreTrainedModel:
    config = tf.LxmertConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_attention_heads=6, intermediate_size=74, l_layers=2, x_layers=2,
        r_layers=1, visual_feat_dim=20, visual_pos_dim=4, num_qa_labels=9, num_object_labels=11, num_attr_labels=7,
        max_position_embeddings=64,
    )  # fmt: skip
    return build(tf.LxmertForPreTraining, config, attention="eager")


def squeezebert(**groups: int) -> PreTrainedModel:
    """Return a model with channels in four groups by default."""
    return encoder("SqueezeBert", embedding_size=48, attention="eager", **{**GROUPS, **groups})


def box_inputs() -> dict[str, Any]:
    """Return words; each word has a box `x0, y0, x1, y1`."""
    boxes = torch.randint(0, 30, (2, 7, 4), generator=torch.Generator().manual_seed(6)).sort(-1).values
    return {**text_inputs(), "bbox": boxes}


def region_inputs() -> dict[str, Any]:
    """Return words, and three regions of an image; each region has twenty features and a box."""
    generator = torch.Generator().manual_seed(7)
    return {
        **text_inputs(),
        "visual_feats": torch.randn(2, 3, 20, generator=generator),
        "visual_pos": torch.rand(2, 3, 4, generator=generator),
    }


def visual_inputs() -> dict[str, Any]:
    regions = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(7))
    return {**text_inputs(), "visual_embeds": regions, "visual_attention_mask": torch.ones(2, 3)}


def table_inputs() -> dict[str, Any]:
    """Return tokens; each token has seven types: segment, column, row and ranks."""
    types = torch.randint(0, 2, (2, 7, 7), generator=torch.Generator().manual_seed(8))
    return {**text_inputs(), "token_type_ids": types}


def entity_inputs() -> dict[str, Any]:
    """Return words, and two entities that span some of the words."""
    spans = torch.full((2, 2, 7), -1)
    spans[:, 0, :2] = torch.tensor([1, 2])
    spans[:, 1, :1] = 4
    return {
        **text_inputs(), "entity_ids": torch.tensor([[5, 9], [11, 3]]), "entity_position_ids": spans,
        "entity_attention_mask": torch.ones(2, 2, dtype=torch.long),
    }  # fmt: skip


def long_inputs(length: int = 40) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(9))
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def global_inputs() -> dict[str, Any]:
    """Return rows whose first token has global attention; in the second row two more tokens have global attention."""
    inputs = long_inputs(11)
    attends = torch.zeros(2, 11, dtype=torch.long)
    attends[:, 0] = 1
    attends[1, 2:4] = 1
    return {**inputs, "global_attention_mask": attends}


GROUPS = {"q_groups": 4, "k_groups": 4, "v_groups": 4, "post_attention_groups": 1, "intermediate_groups": 2,
          "output_groups": 2}  # fmt: skip
TABLE = {"type_vocab_sizes": [3, 4, 4, 2, 4, 4, 4]}
BOTTLENECK = {"embedding_size": 20, "intra_bottleneck_size": 24, "num_feedforward_networks": 3}
SPARSE = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1, "attention": "eager"}
ENTITIES = {"entity_vocab_size": 37, "entity_emb_size": 20, "attention": "eager"}

CASES = [
    Case("bert-generation", lambda: encoder("BertGeneration", "Decoder", **CAUSAL), text_inputs, generates=True),
    Case("dpr", dpr, text_inputs),
    Case("layoutlm", lambda: encoder("LayoutLM", max_2d_position_embeddings=32), box_inputs),
    Case("layoutlm-classifier", lambda: encoder("LayoutLM", "ForSequenceClassification"), box_inputs),
    Case("megatron-bert", lambda: encoder("MegatronBert", attention="eager"), text_inputs),
    Case("megatron-bert-causal", lambda: encoder("MegatronBert", "ForCausalLM", attention="eager", **CAUSAL),
         text_inputs, generates=True),
    Case("tapas", lambda: encoder("Tapas", attention="eager", **TABLE), table_inputs),
    Case("tapas-qa", lambda: encoder("Tapas", "ForQuestionAnswering", attention="eager", **TABLE), table_inputs),
    Case("visual-bert", lambda: encoder("VisualBert", "ForPreTraining", attention="eager", visual_embedding_dim=20),
         visual_inputs),
    Case("roformer", lambda: encoder("RoFormer", attention="eager", embedding_size=20), text_inputs),
    Case("roformer-causal", lambda: encoder("RoFormer", "ForCausalLM", attention="eager", rotary_value=True, **CAUSAL),
         text_inputs, generates=True),
    Case("luke", lambda: encoder("Luke", **ENTITIES), entity_inputs),
    Case("luke-plain", lambda: encoder("Luke", use_entity_aware_attention=False, **ENTITIES), entity_inputs),
    Case("lxmert", lxmert, region_inputs),
    Case("mobilebert", lambda: encoder("MobileBert", **BOTTLENECK), text_inputs),
    Case("mobilebert-shared", lambda: encoder("MobileBert", "Model", **BOTTLENECK, key_query_shared_bottleneck=False,
         use_bottleneck_attention=True), text_inputs),
    Case("mobilebert-wide", lambda: encoder("MobileBert", **{**BOTTLENECK, "use_bottleneck": False}), text_inputs),
    Case("ibert", lambda: encoder("IBert", attention="eager"), text_inputs),
    Case("ibert-classifier", lambda: encoder("IBert", "ForSequenceClassification", attention="eager"), text_inputs),
    Case("convbert", lambda: encoder("ConvBert", attention="eager", heads=8, embedding_size=20, conv_kernel_size=3),
         text_inputs),
    Case("convbert-classifier", lambda: encoder("ConvBert", "ForSequenceClassification", attention="eager"),
         text_inputs),
    Case("convbert-grouped", lambda: encoder("ConvBert", attention="eager", num_groups=2), text_inputs),
    Case("squeezebert", squeezebert, text_inputs),
    Case("squeezebert-ungrouped", lambda: squeezebert(q_groups=1, intermediate_groups=1, output_groups=1), text_inputs),
    Case("big-bird", lambda: encoder("BigBird", **SPARSE), long_inputs),
    Case("big-bird-short", lambda: encoder("BigBird", **SPARSE), text_inputs),
    Case("big-bird-full", lambda: encoder("BigBird", "ForCausalLM", **CAUSAL, attention_type="original_full",
         attention="eager"), text_inputs, generates=True),
    Case("longformer", lambda: encoder("Longformer", attention="eager", attention_window=[4, 6]), global_inputs),
    Case("longformer-classifier", lambda: encoder("Longformer", "ForSequenceClassification", attention="eager",
         attention_window=4), text_inputs),
]  # fmt: skip
