from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class GroundingDinoAttentionPolicy(Policy):
    """BERT's attention over text and over queries. Its mask is repeated for all heads."""

    block = ("GroundingDinoMultiheadAttention", "MMGroundingDinoMultiheadAttention")
    plan = {
        "": Heads("num_attention_heads", scaled=("all_head_size",), biases=("attention_mask",)),
        "{query,key,value}": Column(),
        "out_proj": Row(),
    }


class GroundingDinoDeformablePolicy(Policy):
    """Deformable attention (arXiv:2010.04159): every head has its own sampling points on each level."""

    block = (
        "GroundingDinoMultiscaleDeformableAttention", "MMGroundingDinoMultiscaleDeformableAttention",
        "RTDetrMultiscaleDeformableAttention", "RTDetrV2MultiscaleDeformableAttention",
        "PPDocLayoutV2MultiscaleDeformableAttention", "PPDocLayoutV3MultiscaleDeformableAttention",
        "PPDocLayoutV4MultiscaleDeformableAttention",
    )  # fmt: skip
    plan = {
        "": Heads("n_heads", scaled=("d_model",), weights_dim=2),
        "{sampling_offsets,attention_weights,value_proj}": Column(),
        "output_proj": Row(),
    }


class GroundingDinoFusionPolicy(Policy):
    """Attention in both directions between image and text. Each rank computes all heads on gathered projections,
    because the module returns the weights of both directions."""

    block = ("GroundingDinoBiMultiHeadAttention", "MMGroundingDinoBiMultiHeadAttention")
    plan = {"{vision,text,values_vision,values_text,out_vision,out_text}_proj": Column(gather=True)}


class GroundingDinoFeedForwardPolicy(Policy):
    """The feed-forwards of the text layers, the image layers and the query layers."""

    block = (
        "GroundingDinoTextEnhancerLayer", "GroundingDinoDeformableLayer", "GroundingDinoDecoderLayer",
        "MMGroundingDinoTextEnhancerLayer", "MMGroundingDinoDeformableLayer", "MMGroundingDinoDecoderLayer",
    )  # fmt: skip
    plan = {"fc1": Column(), "fc2": Row()}
