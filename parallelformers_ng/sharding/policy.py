"""Defines the base classes of policies and rules. `rules.py` lists all rules.

A policy names a *block* (a module class of the modelling code, usually one layer) and gives a rule for each layer
beneath the block. The terms come from Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053):

    hidden ─┬─► Column ──► (each rank: its heads, its columns) ──► Row ─► all-reduce ─► hidden
            └─► Column ──┘

`builder.py` builds a plan from policies, a model and a number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.tensors import dotted, is_within


@dataclass(frozen=True)
class Rule:
    """How a policy cuts one layer. A rule's class is defined beside the parallel layer that the rule creates."""

    def finds(self, draft: Draft, path: str) -> bool:
        """Return whether the model has a layer or tensor at `path` that the rule can cut."""
        return path in draft.modules and not isinstance(draft.modules[path], nn.Identity)

    def apply(self, draft: Draft, path: str) -> None:
        """Record in the draft how the tensors at `path` are cut, and the parallel layer that the module becomes.

        Args:
            draft: draft to extend. Its `rule`, `counter` and `heads` are set for this rule.
            path: dotted path of the layer or tensor in the model.

        Raises:
            PolicyError: the rule cannot cut the layer, or another rule has cut a tensor in another way. The builder
                adds the names of rule and layer to the message.
        """
        raise PolicyError(f"{type(self).__name__} does not define how to cut a layer")


class Policy:
    """Rules for the layers of one block class. A subclass sets attributes and defines no methods.

    Attributes:
        block: class name of the block, or a tuple of class names with one layout. If several model families use a
            class name, write the package before it: "ctrl.EncoderLayer".
        plan: path beneath the block → rule. "" is the block itself, a `*` stands for any one name, and "{q,k,v}_proj"
            for three names. A path must exist in at least one block of the model; blocks without the path are allowed.
        optional: paths that a configuration may leave out, each with all paths beneath, such as cross-attention.
        inferred: whether the library inferred the policy on a tiny copy of the model, which may differ from the model.
        requires: attribute path beneath the block → required value, for settings that change the forward's computation.
            The policy does not fit a model with another value.
    """

    block: ClassVar[str | tuple[str, ...]] = ()
    plan: ClassVar[dict[str, Rule]] = {}
    optional: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[dict[str, object]] = {}
    inferred: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if isinstance(cls.plan, dict):  # `check_policy` refuses other values with an explanation
            cls.plan = {name: rule for path, rule in cls.plan.items() for name in _names(path)}
        if isinstance(cls.optional, tuple):
            cls.optional = tuple(name for path in cls.optional for name in _names(path))

    @classmethod
    def blocks(cls) -> tuple[str, ...]:
        """Return the class names in `block`, also a single name as a tuple."""
        return (cls.block,) if isinstance(cls.block, str) else tuple(cls.block)


def _names(path: str) -> list[str]:
    """Expand braces as a shell does: "{k,v}_proj" → "k_proj", "v_proj"."""
    match = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", str(path))
    if match is None:
        return [path]
    before, names, after = match.groups()
    return [before + name + end for name in names.split(",") for end in _names(after)]


CustomPolicies = type[Policy] | Sequence[type[Policy]] | None  # policies of the caller: one, several or none


@dataclass(frozen=True)
class Selection:
    """The policies that apply to one model, and what may be cut without a policy."""

    policies: tuple[type[Policy], ...]  # policies with at least one block in the model
    # Origin of the policies: "custom", "written" or "inferred", joined by "+" if policies have different origins;
    # "leftovers" if no policy applies and only large parameters that no policy names are cut.
    source: str
    vocabulary: bool = True  # whether embeddings and output heads are cut by rows of the vocabulary
    leftovers: bool = True  # whether large parameters that no policy names are cut
    customs: tuple[type[Policy], ...] = ()  # policies of the caller, which may cut foreign code
    # Whether a proof tested the policies, except `customs`, on this model's code. If not, policies except `customs` may
    # cut only modules whose code is of torch or transformers.
    proven: bool = False


def moved(plan: Mapping[str, Rule], path: str, to: str) -> dict[str, Rule]:
    """Return a copy of a policy's `plan` in which rules at and beneath `path` are at and beneath `to`.

    "" is the block itself. All other rules stay unchanged.
    """

    def place(name: str) -> str:
        return dotted(to, name.removeprefix(path).removeprefix(".")) if is_within(name, path) else name

    def counted(rule: Rule) -> Rule:
        heads: str | None = getattr(rule, "heads", None)
        return rule if heads is None else replace(rule, heads=place(heads))  # type: ignore[call-arg]

    return {place(name): counted(rule) for name, rule in plan.items()}


def block_names(module: nn.Module) -> set[str]:
    """Return the names that a policy's `block` may use for a module: "EncoderLayer" and "ctrl.EncoderLayer".

    The names of the class's base classes are included.
    """
    names = set()
    for cls in type(module).__mro__:
        package = cls.__module__.rpartition(".")[0].rpartition(".")[2]
        names |= {cls.__name__, f"{package}.{cls.__name__}"}
    return names


def is_block(module: nn.Module, policy: type[Policy]) -> bool:
    return not block_names(module).isdisjoint(policy.blocks())
