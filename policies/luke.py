from parallelformers_ng.policies.bert import ATTENTION, MLP, BertPolicy
from parallelformers_ng.sharding.rules import Column, Heads


class LukePolicy(BertPolicy):
    """BERT's block over words and entities. Entity-aware attention has a separate query projection for each pair of
    token kinds."""

    block = "LukeLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",), weights=2),
        "attention.self.{w2e,e2w,e2e}_query": Column(),
    }
    optional = ("attention.self.w2e_query", "attention.self.e2w_query", "attention.self.e2e_query")
