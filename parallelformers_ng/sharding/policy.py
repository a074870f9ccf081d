"""How a policy is written: a block, and a rule for each layer beneath it. The rules are in `rules.py`.

A policy names a *block* (a module class of the modelling code, usually one layer) and gives each layer beneath it
a rule. The words are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053):

    hidden ─┬─► Column ──► (each rank: its heads, its columns) ──► Row ─► all-reduce ─► hidden
            └─► Column ──┘

`builder.py` makes a plan of a policy, a model and a number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.partition import HeadShare
from parallelformers_ng.sharding.policy_words import Word


@dataclass(frozen=True)
class Rule(Word):
    """The treatment of a layer that a policy names. A rule is declared beside the parallel layer that it makes."""

    def mistake(self) -> str:
        """Return why its arguments contradict each other, in words; "" if they do not."""
        return ""

    def finds(self, draft: Draft, path: str) -> bool:
        """Return whether a model has at `path` what the rule is for."""
        return path in draft.modules and not isinstance(draft.modules[path], nn.Identity)

    def apply(self, draft: Draft, path: str, heads: list[HeadShare]) -> None:
        """Note in the draft the slices of the tensors at `path` for each rank, and the parallel layer that replaces it.

        Args:
            heads: each rank's heads of the attention around it; none outside of attention.

        Raises:
            PolicyError: the layer cannot be cut so.
        """
        raise PolicyError(f"{draft.who}: {type(self).__name__} says of no layer how it is cut")


class Policy:
    """How the layers of one block class are cut. Subclass it; write no methods.

    Attributes:
        block: class name of the module the plan's paths are relative to, or several that share one layout. A name that
            families share is preceded by its package: "ctrl.EncoderLayer".
        plan: path beneath the block → rule. "" is the block itself, and a `*` stands for any one name. A path matches
            in every block of the model where it exists and must match in at least one.
        optional: paths (each with all that lies beneath) that a configuration may leave out, e.g. cross-attention.
        holds: paths of layers without which a module of that name is another block, as in an earlier release of
            transformers; the policy then leaves it alone. Policies for several layouts of one
            block hold different ones.
        inferred: whether it was found on a small copy of a model, which the model itself may be unlike in places.
        requires: attribute path beneath the block → the value for which the plan is right, for settings that change how
            the forward computes. A model with another value is refused.
    """

    block: ClassVar[str | tuple[str, ...]] = ()
    plan: ClassVar[dict[str, Rule]] = {}
    optional: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[dict[str, object]] = {}
    inferred: ClassVar[bool] = False

    @classmethod
    def blocks(cls) -> tuple[str, ...]:
        return (cls.block,) if isinstance(cls.block, str) else tuple(cls.block)


@dataclass(frozen=True)
class Selection:
    """The policies that apply to a model.

    Attributes:
        policies: each with at least one block in the model.
        source: "custom", "written" or "inferred", joined by "+" where parts differ; "held in parts"
            where only leftovers are cut.
        vocabulary: whether embeddings and heads are cut by rows of the vocabulary.
        leftovers: whether what the policies leave whole is cut where it is large.
        customs: policies of the caller, who answers for the code that they cut.
        proven: whether the others were proven on the code that this model runs. If not, they cut the libraries' own
            code alone.
    """

    policies: tuple[type[Policy], ...]
    source: str
    vocabulary: bool = True
    leftovers: bool = True
    customs: tuple[type[Policy], ...] = ()
    proven: bool = False


def moved(plan: Mapping[str, Rule], path: str, to: str) -> dict[str, Rule]:
    """Return a plan for blocks that hold a module under another name: what it says of `path`, and of all that lies
    beneath, it says of `to`; "" is the block itself. The other rules stay."""

    def place(name: str) -> str:
        inner = name.removeprefix(f"{path}.")
        if name != path and inner == name:
            return name
        return to if name == path else f"{to}.{inner}".removeprefix(".")

    def counted(rule: Rule) -> Rule:
        heads: str | None = getattr(rule, "heads", None)
        return rule if heads is None else replace(rule, heads=place(heads))  # type: ignore[call-arg]

    return {place(name): counted(rule) for name, rule in plan.items()}


def block_names(module: nn.Module) -> set[str]:
    """Return the names by which a policy may call a module: those of its classes, alone and behind their package."""
    names = set()
    for cls in type(module).__mro__:
        package = cls.__module__.rpartition(".")[0].rpartition(".")[2]
        names |= {cls.__name__, f"{package}.{cls.__name__}"}
    return names


def is_block(module: nn.Module, policy: type[Policy]) -> bool:
    """Return whether `module` is a block of `policy`, by class name, a subclass included, and by the layers it must
    hold."""
    named = not block_names(module).isdisjoint(policy.blocks())
    return named and (not policy.holds or set(policy.holds) <= {name for name, _ in module.named_modules()})
