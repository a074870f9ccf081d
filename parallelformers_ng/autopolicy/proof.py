"""The twin proof: a policy nobody wrote is accepted only if a tiny twin gives, cut, what it gives whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.search import Search
from parallelformers_ng.autopolicy.trials import Choice, Trials, unreached
from parallelformers_ng.autopolicy.twin import Twin
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.errors import PolicyError, UnsupportedModelError
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.registry import Selection
from parallelformers_ng.sharding.rules import Policy


@dataclass
class Proof:
    """What a twin proof found.

    Attributes:
        selection: the policies to use, those that were there before included.
        tried: what was tried and did not hold, for people.
        unproven: parts that the twin's inputs did not reach, so that they stay whole.
        chosen: the rules that were found, which another number of ranks tries first.
    """

    selection: Selection
    tried: list[str] = field(default_factory=list)
    unproven: str = ""
    chosen: Sequence[Choice] = ()


_FIRST = 2
"""Ranks for which rules are searched, as few make the quickest trials; for more, what was found has to hold again."""
_CACHE: dict[tuple[Any, ...], Proof | UnsupportedModelError] = {}
_CUSTOM: dict[tuple[Any, ...], str] = {}
_TWINS: dict[tuple[Any, ...], Twin] = {}
"""The latest twin alone: proofs for several world sizes follow one another."""


def prove(model: PreTrainedModel, base: Selection, world_size: int) -> Proof:
    """Find and prove policies for the blocks that `base` leaves.

    Args:
        model: the model, on any device; only its class and configuration are looked at.
        base: policies that apply already, possibly none.
        world_size: ranks to prove it for, at least 1.

    Raises:
        UnsupportedModelError: no twin could be made, or nothing that was proposed held.
    """
    found = _known(model, base, world_size)
    if isinstance(found, UnsupportedModelError):
        raise found
    return found


def _known(model: PreTrainedModel, base: Selection, world_size: int) -> Proof | UnsupportedModelError:
    key = (*_identity(model), world_size, base.policies)
    if key not in _CACHE:
        _CACHE[key] = _find(model, base, world_size)
    return _CACHE[key]


def check(model: PreTrainedModel, selection: Selection, world_size: int) -> str:
    """Prove policies that were written: "" where a twin gives, cut by them, what it gives whole, else what it gave.

    Raises:
        UnsupportedModelError: no twin could be made.
    """
    trials = Trials(_twin(model), selection, world_size)
    return "" if trials.hold([], selection.vocabulary, selection.leftovers) else trials.last


def prove_custom(model: PreTrainedModel, policies: tuple[type[Policy], ...], world_size: int) -> None:
    """Refuse a caller's policies by which a twin gives other values than whole, or that no twin shows to be right.

    Raises:
        PolicyError: names the policies, what was wrong and the next step.
    """
    key = (*_identity(model), world_size, policies, str([policy.plan for policy in policies]))
    if key not in _CUSTOM:
        _CUSTOM[key] = _doubt(model, policies, world_size)
    if _CUSTOM[key]:
        names = ", ".join(policy.__name__ for policy in policies)
        raise PolicyError(f"{names} on {world_size} ranks: {_CUSTOM[key]}; prove=False uses it unproven")


def _doubt(model: PreTrainedModel, policies: tuple[type[Policy], ...], world_size: int) -> str:
    """Why the policies are not to be trusted, in words; "" where a twin proves them."""
    try:
        twin = _twin(model)
    except UnsupportedModelError as error:
        return f"it cannot be proven: {error}"
    trials = Trials(twin, Selection(policies, "custom", vocabulary=False, leftovers=False), world_size)
    hint = "look for projections that share a layer (fused=) and for what the forward reads (scaled=)"
    if not trials.hold([], False):
        return (
            f"a tiny twin of {type(model).__name__} gives, cut by it, other values than whole ({trials.last}); {hint}"
        )
    prompt = trials.prompt()
    if prompt is not None and not trials.same_tokens([], False, *prompt):
        return f"a tiny twin of {type(model).__name__} generates, cut by it, other tokens ({trials.last}); {hint}"
    untried = unreached(build_plan(twin.model, world_size, trials.base), twin)
    return f"it cannot be proven: the twin's inputs do not reach what {untried[0]} cuts" if untried else ""


def _find(model: PreTrainedModel, base: Selection, world_size: int) -> Proof | UnsupportedModelError:
    try:
        twin = _twin(model)
    except UnsupportedModelError as error:
        # Written policies need no proof; what they leave stays whole, as the plan says.
        return Proof(base, unproven=str(error)) if base.policies else error
    first = _known(model, base, _FIRST) if world_size > _FIRST else None
    earlier = first if isinstance(first, Proof) else Proof(base)
    search = Search(Trials(twin, base, world_size), earlier.chosen, earlier.selection.vocabulary)
    try:
        return Proof(search.result(), [*earlier.tried, *search.tried], twin.untold, search.chosen)
    except UnsupportedModelError as error:
        return error


def _twin(model: PreTrainedModel) -> Twin:
    key = _identity(model)
    if key not in _TWINS:
        _TWINS.clear()
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched gradients off
            _TWINS[key] = make_twin(type(model), model.config, _attention(model))
    return _TWINS[key]


def _identity(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a proof depends on: two models that agree in it have the same twin."""
    shape = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    return type(model), shape, _attention(model), transformers.__version__


def _attention(model: PreTrainedModel) -> str | None:
    return getattr(model.config, "_attn_implementation", None)
