from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class SqueezeBertPolicy(Policy):
    """BERT's block with convolutions of width one, most of them grouped, instead of linear layers.

    The groups of the second feed-forward convolution are groups of its inputs, so all channels are gathered before it.
    """

    block = "SqueezeBertModule"
    plan = {
        "attention": Heads("num_attention_heads", scaled=("all_head_size",), weights="attention_score"),
        "attention.{query,key,value}": Column(),
        "post_attention.conv1d": Row(heads="attention"),
        "intermediate.conv1d": Column(gather=True),
        "output.conv1d": Column(gather=True),
    }
