from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class AlbertPolicy(Policy):
    """BERT's block; all layers of the model share the weights of one block."""

    block = "AlbertLayer"
    plan = {
        "attention": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.{query,key,value}": Column(),
        "attention.dense": Row(),
        "ffn": Column(),
        "ffn_output": Row(),
    }
