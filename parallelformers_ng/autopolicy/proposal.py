"""Defines proposals of rules for blocks without a policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from parallelformers_ng.sharding.rules import Column, Policy, Rule

Kind = Literal["attention", "mlp", "experts", "gathered"]


@dataclass(frozen=True)
class Proposal:
    """Rules for one part of a block, which a trial applies together."""

    block: str  # class name of the block; all paths are relative to the block
    kind: Kind  # kind of the layers
    variants: tuple[dict[str, Rule], ...]  # alternative rules, each by path, the most likely first
    # paths of layers to try one by one as column-parallel layers with gathered outputs, if every variant fails
    gathered: tuple[str, ...] = ()

    @property
    def paths(self) -> set[str]:
        """Paths of all layers that the variants or `gathered` name."""
        return {path for rules in self.variants for path in rules} | set(self.gathered)

    def one_by_one(self) -> list[Proposal]:
        gather = Column("column", gather=True)
        return [Proposal(self.block, "gathered", ({path: gather},)) for path in self.gathered]


def policies_of(parts: Iterable[tuple[str, dict[str, Rule]]]) -> tuple[type[Policy], ...]:
    """Return one policy for each block class, in the order of their first pairs.

    A policy is named `Inferred{block}Policy`. All its rules are optional, because another model may lack a path.
    """
    plans: dict[str, dict[str, Rule]] = {}
    for block, rules in parts:
        plans.setdefault(block, {}).update(rules)
    return tuple(
        type(
            f"Inferred{block}Policy",
            (Policy,),
            {"block": block, "plan": plan, "optional": tuple(plan), "inferred": True},
        )
        for block, plan in plans.items()
    )
