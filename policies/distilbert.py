from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class DistilBertPolicy(Policy):
    """BERT's block with other names of layers. The model has half as many blocks."""

    block = "TransformerBlock"
    plan = {
        "attention": Heads("n_heads", scaled=("dim",)),
        "attention.{q,k,v}_lin": Column(),
        "attention.out_lin": Row(),
        "ffn.lin1": Column(),
        "ffn.lin2": Row(),
    }
