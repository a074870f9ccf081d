"""Defines proposals of rules for blocks without a policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from parallelformers_ng.sharding.rules import Column, Experts, Policy, Rule
from parallelformers_ng.sharding.structure import Place

Kind = Literal["attention", "mlp", "experts", "gathered"]


@dataclass(frozen=True)
class Proposal:
    """Inferred rules for one part of a block, such as its attention; a trial applies all of them or none."""

    block: str  # class name of the block; all paths are relative to the block
    kind: Kind  # kind of layers that the rules cut, such as attention
    variants: tuple[dict[str, Rule], ...]  # alternative rules, each by path, the most likely first
    # paths of layers to try one by one as column-parallel layers with gathered outputs, if every variant fails
    gathered: tuple[str, ...] = ()

    @property
    def rules(self) -> dict[str, Rule]:
        """The most likely rules."""
        return self.variants[0]

    @property
    def paths(self) -> set[str]:
        """Paths of all layers that the variants or `gathered` name."""
        return {path for rules in self.variants for path in rules} | set(self.gathered)

    def alternatives(self) -> list[Proposal]:
        """One proposal for each variant."""
        return [replace(self, variants=(rules,)) for rules in self.variants]

    def one_by_one(self) -> list[Proposal]:
        return [gathered_layer(Place(self.block, path)) for path in self.gathered]


def experts_at(place: Place) -> Proposal:
    return Proposal(place.block, "experts", ({place.path: Experts()},))


def gathered_layer(place: Place) -> Proposal:
    return Proposal(place.block, "gathered", ({place.path: Column("column", gather=True)},))


def policies_of(proposals: Iterable[Proposal]) -> tuple[type[Policy], ...]:
    """Return one policy for each block class, in the order of their first proposals, with the proposals' `rules`.

    A policy is named `Inferred{block}Policy`. All its rules are optional, because another model may lack a path.
    """
    plans: dict[str, dict[str, Rule]] = {}
    for proposal in proposals:
        plans.setdefault(proposal.block, {}).update(proposal.rules)
    return tuple(
        type(
            f"Inferred{block}Policy",
            (Policy,),
            {"block": block, "plan": plan, "optional": tuple(plan), "inferred": True},
        )
        for block, plan in plans.items()
    )
