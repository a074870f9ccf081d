from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy
from parallelformers_ng.policies.electra import ElectraProjectionPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class ConvBertPolicy(Policy):
    """Half of each block's heads attend; the other half convolve with a kernel that is made from the columns of all of
    them. The result holds the heads that attend, then those that convolve."""

    block = "ConvBertLayer"
    plan = {
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.self.query": Column(),
        "attention.self.key": Column(),
        "attention.self.value": Column(),
        "attention.self.key_conv_attn_layer.pointwise": Column(),
        "attention.self.key_conv_attn_layer.bias": Slice(0),
        "attention.self.conv_kernel_layer": Column(gather_inputs=True),
        "attention.self.conv_out_layer": Column(),
        "attention.output.dense": Row(heads="attention.self", fused=2),
        "intermediate.dense": Column(),
        "output.dense": Row(),
    }


class ConvBertHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("ConvBertGeneratorPredictions", "ConvBertClassificationHead", "ConvBertPredictionHeadTransform")


class ConvBertProjectionPolicy(ElectraProjectionPolicy):
    """From the width of the embeddings to that of the blocks, if they differ."""

    block = "ConvBertModel"
