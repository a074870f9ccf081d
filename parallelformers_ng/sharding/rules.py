"""Lists all rules of policies. Each rule's class is defined beside the parallel layer that the rule creates."""

from parallelformers_ng.sharding.experts import Experts
from parallelformers_ng.sharding.heads import Heads, Renewed
from parallelformers_ng.sharding.linear import Column, Gather, Reduce, Row, Slice
from parallelformers_ng.sharding.norms import GaussianTopK, HeadNorms, Norm
from parallelformers_ng.sharding.partition import Part
from parallelformers_ng.sharding.policy import Policy, Rule, moved
from parallelformers_ng.sharding.stored import Stored
from parallelformers_ng.sharding.vocabulary import Vocabulary

__all__ = [
    "Column", "Experts", "Gather", "GaussianTopK", "HeadNorms", "Heads", "Norm", "Part", "Policy", "Reduce", "Renewed",
    "Row", "Rule", "Slice", "Stored", "Vocabulary", "moved",
]  # fmt: skip
