from parallelformers_ng.policies.bert import MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class DebertaPolicy(Policy):
    """A block of disentangled attention: `in_proj` is interleaved per head, and relative positions have separate
    projections.

    The policy does not fit models with talking heads, because talking heads mix the scores of all heads.
    """

    block = "DebertaLayer"
    plan = {
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.self.in_proj": Column(),
        "attention.self.{q,v}_bias": Slice(0),
        "attention.self.{pos,pos_q}_proj": Column(),
        "attention.output.dense": Row(heads="attention.self"),
        **MLP,
    }
    optional = ("attention.self.pos_proj", "attention.self.pos_q_proj")
    requires = {"attention.self.talking_head": False}


class DebertaV2Policy(Policy):
    """A block of disentangled attention with separate projections. Relative positions may share the content's
    projections."""

    block = "DebertaV2Layer"
    plan = {
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.self.{query,key,value,pos_key,pos_query}_proj": Column(),
        "attention.output.dense": Row(heads="attention.self"),
        **MLP,
    }
    optional = ("attention.self.pos_key_proj", "attention.self.pos_query_proj")


class DebertaMaskedLMPolicy(Policy):
    """The masked-language model with the legacy head. The policy does not fit the newer head, which reads the
    embeddings' weights directly."""

    block = ("DebertaForMaskedLM", "DebertaV2ForMaskedLM")
    requires = {"legacy": True}
