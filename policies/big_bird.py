from parallelformers_ng.policies.bert import BertPolicy
from parallelformers_ng.sharding.rules import Renewed


class BigBirdPolicy(BertPolicy):
    """BERT's block with attention to blocks of the sequence. For a short sequence the model changes to full attention.
    Random blocks are drawn only in training."""

    block = "BigBirdLayer"
    plan = {**BertPolicy.plan, "attention": Renewed("self")}
