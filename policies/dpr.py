from __future__ import annotations

from parallelformers_ng.sharding.rules import Column, Policy


class DPRProjectionPolicy(Policy):
    """From the width of BERT, whose blocks have its policy, to that in which questions and passages are compared."""

    block = "DPREncoder"
    plan = {"encode_proj": Column(gather=True)}
    optional = ("encode_proj",)
