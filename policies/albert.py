from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class AlbertPolicy(Policy):
    """BERT's block; all layers of the model share the weights of one block."""

    block = "AlbertLayer"
    plan = {
        "attention": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.query": Column(),
        "attention.key": Column(),
        "attention.value": Column(),
        "attention.dense": Row(),
        "ffn": Column(),
        "ffn_output": Row(),
    }


class AlbertProjectionPolicy(Policy):
    """Projections from the width of the embeddings to that of the block, and back, and the pooler of the first
    token."""

    block = ("AlbertTransformer", "AlbertMLMHead", "AlbertModel")
    plan = {
        "embedding_hidden_mapping_in": Column(gather=True),
        "dense": Column(gather=True),
        "pooler": Column(gather=True),
    }
    optional = ("dense", "pooler")
