from parallelformers_ng.policies.bert import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Policy, Row, Slice


class ConvBertPolicy(Policy):
    """BERT's block in which half of the heads attend and the other half convolve. The convolution's kernel depends on
    the columns of all convolving heads. The output has the attending heads first, then the convolving heads."""

    block = "ConvBertLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "attention.self.key_conv_attn_layer.pointwise": Column(),
        "attention.self.key_conv_attn_layer.bias": Slice(0),
        "attention.self.conv_kernel_layer": Column(gather_inputs=True),
        "attention.self.conv_out_layer": Column(),
        "attention.output.dense": Row(heads="attention.self", fused=2),
    }
