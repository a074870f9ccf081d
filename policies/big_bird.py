from parallelformers_ng.policies.bert import ATTENTION, BertPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Renewed, Row, moved


class BigBirdPolicy(BertPolicy):
    """BERT's block with attention to blocks of the sequence. For a short sequence the model changes to full attention.
    Random blocks are drawn only in training."""

    block = "BigBirdLayer"
    plan = {**BertPolicy.plan, "attention": Renewed("self")}


class BigBirdPegasusEncoderPolicy(Policy):
    """BigBird's attention in Pegasus' layer. For a short sequence the model changes to full attention."""

    block = "BigBirdPegasusEncoderLayer"
    plan = {
        **moved(moved(ATTENTION, "attention.output.dense", "attention.output"), "attention", "self_attn"),
        "self_attn": Renewed("self"),
        "fc1": Column(),
        "fc2": Row(),
    }
