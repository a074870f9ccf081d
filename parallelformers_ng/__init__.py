"""Run a Hugging Face model that is too big or too slow for one GPU, with one line of Python."""

from parallelformers_ng.parallelize import parallelize, plan, start_group
from parallelformers_ng.sharding.policy import Column, Experts, Heads, Policy, Reduce, Row, Slice

__all__ = ["Column", "Experts", "Heads", "Policy", "Reduce", "Row", "Slice", "parallelize", "plan", "start_group"]
__version__ = "0.1.0"
