from parallelformers_ng.policies.bert import BertHeadPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class DebertaPolicy(Policy):
    """Disentangled attention: `in_proj` is interleaved per head; relative positions have projections of their own.

    Talking heads mix the scores of all heads, which no rank has.
    """

    block = "DebertaLayer"
    plan = {
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.self.in_proj": Column(),
        "attention.self.q_bias": Slice(0),
        "attention.self.v_bias": Slice(0),
        "attention.self.pos_proj": Column(),
        "attention.self.pos_q_proj": Column(),
        "attention.output.dense": Row(heads="attention.self"),
        "intermediate.dense": Column(),
        "output.dense": Row(),
    }
    optional = ("attention.self.pos_proj", "attention.self.pos_q_proj")
    requires = {"attention.self.talking_head": False}


class DebertaV2Policy(Policy):
    """Disentangled attention with separate projections; the relative positions may share those of the content."""

    block = "DebertaV2Layer"
    plan = {
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.self.query_proj": Column(),
        "attention.self.key_proj": Column(),
        "attention.self.value_proj": Column(),
        "attention.self.pos_key_proj": Column(),
        "attention.self.pos_query_proj": Column(),
        "attention.output.dense": Row(heads="attention.self"),
        "intermediate.dense": Column(),
        "output.dense": Row(),
    }
    optional = ("attention.self.pos_key_proj", "attention.self.pos_query_proj")


class DebertaHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads, and between embeddings and blocks of different widths."""

    block = (
        "LegacyDebertaPredictionHeadTransform", "LegacyDebertaV2PredictionHeadTransform", "ContextPooler",
        "DebertaEmbeddings", "DebertaV2Embeddings",
    )  # fmt: skip
    plan = {**BertHeadPolicy.plan, "embed_proj": Column(gather=True)}
    optional = ("dense", "embed_proj")


class DebertaMaskedLMPolicy(Policy):
    """The newer head multiplies with the embeddings' weights past their layer, so these could not be cut."""

    block = ("DebertaForMaskedLM", "DebertaV2ForMaskedLM")
    requires = {"legacy": True}
