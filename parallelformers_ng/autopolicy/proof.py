"""Checks policies on a twin, a tiny random copy of the model: its sharded and whole outputs must match."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.rule_search import RuleSearch
from parallelformers_ng.autopolicy.trials import Choice, Trials, unproven_rules
from parallelformers_ng.autopolicy.twin import Twin
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.errors import PolicyError, UnsupportedModelError
from parallelformers_ng.live_code.stock import foreign_modules
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.rules import Policy
from parallelformers_ng.sharding.units import and_above
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler


@dataclass
class Proof:
    """The result of a search for policies and of their proof."""

    selection: Selection  # policies to use, including written policies
    tried: list[str] = field(default_factory=list)  # failed attempts with reasons, as text
    unproven: str = ""  # text about parts that stay whole: no inputs of the twin reach them, or no twin could be made
    chosen: Sequence[Choice] = ()  # inferred rules, which a search for another number of ranks tries first


# Number of ranks of the first search, because trials on few ranks are fast. Later searches try its rules first.
_FIRST = 2
_CACHE: dict[tuple[Any, ...], Proof | UnsupportedModelError] = {}
_CUSTOM: dict[tuple[Any, ...], str] = {}
_LIVE: dict[tuple[Any, ...], bool] = {}
# Only the latest twin, because proofs of one model for several world sizes follow one another.
_TWINS: dict[tuple[Any, ...], Twin] = {}


def prove(model: PreTrainedModel, base: Selection, world_size: int, parts: tuple[float, ...] = ()) -> Proof:
    """Find and prove policies for the blocks that the policies of `base` do not cover."""
    key = (*identity(model), world_size, parts, base.policies)
    if key not in _CACHE:
        _CACHE[key] = _search(model, base, world_size, parts)
    proof = _CACHE[key]
    if isinstance(proof, UnsupportedModelError):
        raise proof
    return proof


def prove_live_code(
    model: PreTrainedModel, selection: Selection, world_size: int, parts: Sequence[float] = ()
) -> Selection:
    """Check on a twin whether policies may shard modules with foreign code: sharded and whole outputs must match."""
    proven = replace(selection, proven=True)
    any_precision = QuantizeOptions(dequantize=True)  # the caller's plan refuses weights that may not change precision
    uncut = build_plan(model, world_size, selection, parts=parts, quantize=any_precision).uncut
    if uncut == build_plan(model, world_size, proven, parts=parts, quantize=any_precision).uncut:
        return selection  # a proof would not change the plan
    key = (*identity(model), world_size, tuple(parts), selection)
    if key not in _LIVE:
        try:
            twin = twin_of(model)
            _LIVE[key] = _runs_foreign_code(twin) and not Trials(twin, proven, world_size, parts).objection()
        except UnsupportedModelError:
            _LIVE[key] = False
    return proven if _LIVE[key] else selection


def _runs_foreign_code(twin: Twin) -> bool:
    """Whether a twin that may run only in parts runs all modules with foreign code."""
    paths = {probe.path for probe in twin.probes}
    return all(paths.intersection(and_above(path)) for path in foreign_modules(twin.model))


def check(model: PreTrainedModel, selection: Selection, world_size: int) -> str:
    """Check written policies on a twin."""
    trials = Trials(twin_of(model), selection, world_size)
    return "" if trials.match([], selection.vocabulary, selection.leftovers) else trials.failure


def prove_custom(
    model: PreTrainedModel, policies: tuple[type[Policy], ...], world_size: int, parts: Sequence[float] = ()
) -> None:
    """Check custom policies on a twin."""
    key = (*identity(model), world_size, tuple(parts), policies, str([policy.plan for policy in policies]))
    if key not in _CUSTOM:
        _CUSTOM[key] = _objection(model, policies, world_size, parts)
    if _CUSTOM[key]:
        names = ", ".join(policy.__name__ for policy in policies)
        raise PolicyError(f"{names} on {world_size} ranks: {_CUSTOM[key]}; prove=False skips this check")


def _objection(
    model: PreTrainedModel, policies: tuple[type[Policy], ...], world_size: int, parts: Sequence[float]
) -> str:
    try:
        twin = twin_of(model)
    except UnsupportedModelError as error:
        return f"the policy cannot be proven: {error}"
    trials = Trials(
        twin, Selection(policies, "custom", vocabulary=False, leftovers=False, customs=policies), world_size, parts
    )
    if difference := trials.objection():
        return (
            f"a tiny twin of {type(model).__name__} has other outputs sharded than whole ({difference}); look for"
            " projections that share a layer (fused=) and for attributes that the forward reads (scaled=)"
        )
    untried = unproven_rules(build_plan(twin.model, world_size, trials.base, parts=parts), twin)
    return f"the policy cannot be proven: the twin's inputs do not reach the tensors of {untried[0]}" if untried else ""


def _search(
    model: PreTrainedModel, base: Selection, world_size: int, parts: tuple[float, ...]
) -> Proof | UnsupportedModelError:
    proven = True
    try:
        try:
            twin = twin_of(model)
        except UnsupportedModelError:
            if not LiveEdits(model):
                raise
            proven = False
            twin = make_twin(type(model), model.config, attention_of(model))
    except UnsupportedModelError as error:
        # Written policies need no proof. Other parts of the model stay whole, and the plan lists them.
        return Proof(base, unproven=str(error)) if base.policies else error
    earlier = Proof(base)
    if world_size > _FIRST or parts:
        with contextlib.suppress(UnsupportedModelError):
            earlier = prove(model, base, _FIRST)
    search = RuleSearch(Trials(twin, base, world_size, parts), earlier.chosen, earlier.selection.vocabulary)
    try:
        return Proof(
            replace(search.result(), proven=proven), [*earlier.tried, *search.tried], twin.unreached, search.chosen
        )
    except UnsupportedModelError as error:
        return error
    except Exception as error:  # modelling code may raise any exception on a small sharded model
        raise_if_of_handler(error)
        text = (
            f"no policy knows {type(model).__name__}, and none could be inferred: the search ended with"
            f" {type(error).__name__}: {error}. Write a policy (POLICY.md shows how), or report this error"
        )
        return UnsupportedModelError(text).with_traceback(error.__traceback__)


def twin_of(model: PreTrainedModel) -> Twin:
    key = identity(model)
    if key not in _TWINS:
        _TWINS.clear()
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched gradients off
            _TWINS[key] = make_twin(type(model), model.config, attention_of(model), edits=LiveEdits(model))
    return _TWINS[key]


def identity(model: PreTrainedModel) -> tuple[Any, ...]:
    shape = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    return type(model), shape, attention_of(model), transformers.__version__, LiveEdits(model).key


def attention_of(model: PreTrainedModel) -> str | None:
    """Return the name of a model's attention implementation, such as "sdpa"; None if the configuration has none."""
    return getattr(model.config, "_attn_implementation", None)
