"""Checks policies on a twin, a tiny random copy of the model: its sharded and whole outputs must match."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import transformers
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.proposal import Proposal
from parallelformers_ng.autopolicy.rule_search import RuleSearch
from parallelformers_ng.autopolicy.settings import parts_of
from parallelformers_ng.autopolicy.shrink import Shrinking
from parallelformers_ng.autopolicy.trials import Trials, unproven_rules
from parallelformers_ng.autopolicy.twin import Twin
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.errors import PolicyError, UnsupportedModelError
from parallelformers_ng.live_code.stock import foreign_modules
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.rules import Policy
from parallelformers_ng.sharding.tensors import is_within
from parallelformers_ng.sharding.units import and_above
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

T = TypeVar("T")


@dataclass
class Proof:
    """Policies with which the outputs of a sharded and a whole twin match, and the failed attempts of the search."""

    selection: Selection  # policies to use, including written policies
    tried: list[str] = field(default_factory=list)  # failed attempts with reasons, as text
    unproven: str = ""  # text about parts that stay whole: no inputs of the twin reach them, or no twin could be made
    chosen: Sequence[Proposal] = ()  # inferred rules, which a search for another number of ranks tries first


# The first search is for 2 ranks, because trials on few ranks are fast. A search for more ranks tries its rules first.
_FIRST = 2
# Selection without policies, for pipelines with one rank per stage, whose layers are not cut.
UNCUT = Selection((), "pipeline", vocabulary=False, leftovers=False)
# A twin has 4 layers, 2 in each of 2 stages, to test hidden states passed within a stage and between stages.
_LAYERS = 4
_RESULTS: dict[tuple[Any, ...], Any] = {}
# Cache of only the latest twin, because proofs of one model for several world sizes follow one another.
_TWINS: dict[tuple[Any, ...], Twin] = {}


class _Refusal(NamedTuple):
    text: str  # not the error itself, whose traceback would keep the model in memory


def remembered(make: Callable[[], T], model: PreTrainedModel, *question: Any) -> T:
    """Return `make()`, cached by `question` and by the class, configuration and code of the model.

    An UnsupportedModelError is cached, too: an error with the same text is raised.
    """
    key = (*identity(model), *question)
    if key not in _RESULTS:
        try:
            _RESULTS[key] = make()
        except UnsupportedModelError as error:
            _RESULTS[key] = _Refusal(str(error))
            raise
    result: T | _Refusal = _RESULTS[key]
    if isinstance(result, _Refusal):
        raise UnsupportedModelError(result.text)
    return result


def prove(model: PreTrainedModel, base: Selection, world_size: int, parts: tuple[float, ...] = ()) -> Proof:
    """Find and prove policies for the blocks that the policies of `base` do not cover."""
    question = ("policies", world_size, parts, base.policies)
    return remembered(lambda: _search(model, base, world_size, parts), model, *question)


def prove_live_code(
    model: PreTrainedModel, selection: Selection, world_size: int, parts: Sequence[float] = ()
) -> Selection:
    """Return `selection`, marked as proven if sharded modules with foreign code give the outputs of whole modules on a
    small copy of the model."""
    proven = replace(selection, proven=True)
    any_precision = QuantizeOptions(dequantize=True)  # the plan, not the proof, refuses to dequantize
    uncut = build_plan(model, world_size, selection, parts=parts, quantize=any_precision).uncut
    if uncut == build_plan(model, world_size, proven, parts=parts, quantize=any_precision).uncut:
        return selection  # no layer stays whole because of foreign code, so a proof would not change the plan

    def proves() -> bool:
        trials = Trials(twin_of(model), proven, world_size, parts)
        return _runs_foreign_code(trials) and not trials.objection()

    question = ("live code", world_size, tuple(parts), selection)
    try:
        fits = remembered(proves, model, *question)
    except UnsupportedModelError:
        fits = False
    return proven if fits else selection


def _runs_foreign_code(trials: Trials) -> bool:
    """Whether the twin's runs reach every module with foreign code that is in a block to be sharded."""
    run = {probe.path for probe in trials.twin.probes}
    unrun = [path for path in foreign_modules(trials.twin.model) if run.isdisjoint(and_above(path))]
    units = trials.plan([], trials.base.vocabulary, trials.base.leftovers).units if unrun else ()
    return not any(is_within(path, unit) for path in unrun for unit in units)


def check(model: PreTrainedModel, selection: Selection, world_size: int) -> str:
    """Return why written policies fail on a twin; "" if sharded and whole outputs match."""
    trials = Trials(twin_of(model), selection, world_size)
    return "" if trials.match([], selection.vocabulary, selection.leftovers) else trials.failure


def prove_custom(
    model: PreTrainedModel, policies: tuple[type[Policy], ...], world_size: int, parts: Sequence[float] = ()
) -> None:
    """Raise an error if custom policies fail on a twin, because its sharded and whole outputs do not match."""
    plans = str([policy.plan for policy in policies])
    question = ("custom", world_size, tuple(parts), policies, plans)
    if why := remembered(lambda: _objection(model, policies, world_size, parts), model, *question):
        names = ", ".join(policy.__name__ for policy in policies)
        raise PolicyError(f"{names} on {world_size} ranks: {why}; prove=False skips this check")


def _objection(
    model: PreTrainedModel, policies: tuple[type[Policy], ...], world_size: int, parts: Sequence[float]
) -> str:
    try:
        twin = twin_of(model)
    except UnsupportedModelError as error:
        return f"the policy cannot be proven: {error}"
    selection = Selection(policies, "custom", vocabulary=False, leftovers=False, customs=policies)
    trials = Trials(twin, selection, world_size, parts)
    if difference := trials.objection():
        return (
            f"a tiny twin of {type(model).__name__} has other outputs sharded than whole ({difference}); look for"
            " projections that share a layer (fused=) and for attributes that the forward reads (scaled=)"
        )
    untried = unproven_rules(build_plan(twin.model, world_size, selection, parts=parts), twin)
    return f"the policy cannot be proven: the twin's inputs do not reach the tensors of {untried[0]}" if untried else ""


def _search(model: PreTrainedModel, base: Selection, world_size: int, parts: tuple[float, ...]) -> Proof:
    try:
        try:
            twin, proven = twin_of(model), True
        except UnsupportedModelError:
            if not LiveEdits(model):
                raise
            twin, proven = make_twin(type(model), model.config), False
    except UnsupportedModelError as error:
        if not base.policies:
            raise
        # Written policies need no proof. Other parts of the model stay whole, and the plan lists them.
        return Proof(base, unproven=str(error))
    earlier = Proof(base)
    if world_size > _FIRST or parts:
        with contextlib.suppress(UnsupportedModelError):
            earlier = prove(model, base, _FIRST)
    search = RuleSearch(Trials(twin, base, world_size, parts), earlier.chosen, earlier.selection.vocabulary)
    try:
        selection = replace(search.result(), proven=proven)
    except UnsupportedModelError:
        raise
    except Exception as error:  # modelling code may raise any exception on a small sharded model
        raise_if_of_handler(error)
        raise UnsupportedModelError(
            f"no policy knows {type(model).__name__}, and none could be inferred: the search ended with"
            f" {type(error).__name__}: {error}. Write a policy (POLICY.md shows how), or report this error"
        ) from error
    return Proof(selection, [*earlier.tried, *search.tried], twin.unreached, search.chosen)


def may_merge(model: PreTrainedModel) -> bool:
    """Return whether a pipeline stage may send only its last block's output to other stages, not every block's.

    A twin in two stages must have the same outputs as the whole twin. If it has not, each block's output is sent.
    """
    try:
        return remembered(lambda: _are_merged(model), model, "stages")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be computed in stages: {error}") from error


def _are_merged(model: PreTrainedModel) -> bool:
    twin = twin_of(model, _LAYERS)
    if not twin.runs_whole:
        raise UnsupportedModelError(f"a tiny twin runs on none of the known inputs: {twin.unreached[:300]}")
    for merged in (True, False):
        failure = _StageTrials(twin, merged).objection()
        if not failure:
            return merged
    raise UnsupportedModelError(
        f"a tiny random copy of the model has other outputs in two stages than whole ({failure})"
    )


class _StageTrials(Trials):
    """Trials of a twin that is divided into two stages of one rank each."""

    def __init__(self, twin: Twin, merged: bool) -> None:
        super().__init__(twin, UNCUT, world_size=2)
        self._merged = merged

    def plan(self, *choices: Any, **leftovers: Any) -> ShardPlan:
        return in_stages(build_plan(self.twin.model, 1, UNCUT), self.twin.model, [0.5, 0.5], self._merged)


def twin_of(model: PreTrainedModel, layers: int = Shrinking.layers) -> Twin:
    key = (*identity(model), layers)
    if key not in _TWINS:
        _TWINS.clear()
        _TWINS[key] = make_twin(type(model), model.config, layers=layers, edits=LiveEdits(model))
    return _TWINS[key]


def identity(model: PreTrainedModel) -> tuple[Any, ...]:
    shape = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    attentions = tuple(part._attn_implementation for part in parts_of(model.config))
    return type(model), shape, attentions, transformers.__version__, LiveEdits(model).key
