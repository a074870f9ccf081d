"""Judges a model type on a tiny random model: sharded and whole outputs must match. The ranks are threads."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from transformers import GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.autopolicy.trials import comparable_probes
from parallelformers_ng.autopolicy.twin import Twin, difference, run, sharing_copy
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import PolicyError, UnsupportedModelError
from parallelformers_ng.generation.lockstep import agreed_criteria
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.plan import ShardPlan
from tests.zoo.catalogue import classes_of
from tests.zoo.decoding import draws_of_each_thread, generate
from tests.zoo.overrides import configuration
from tests.zoo.variation import varied_twin

SEED = 20
"""Not the seed of the proofs: a proof must hold for other weights and inputs."""

TOLERANCE = 1e-4


@dataclass
class Verdict:
    """The verdict on one model type at one world size.

    Attributes:
        model_type, model_class: names of the type and of the class.
        world_size: number of ranks.
        status: "equal", "wrong", "refused" or "skipped" (cannot be built or run whole).
        reason: explanation, unless equal.
        source: source of the policies.
        share: share of the cuttable bytes that are cut, 0 to 1.
        compared: outputs compared: "forward", "parts", single "layers", and the ways of decoding ("greedy", "beam",
            "sampled").
        seconds: wall-clock time.
    """

    model_type: str
    model_class: str
    world_size: int
    status: str
    reason: str = ""
    source: str = ""
    share: float = 0.0
    compared: str = ""
    seconds: float = 0.0


def judge(model_type: str, world_sizes: tuple[int, ...] = (2,), varied: bool = False) -> list[dict[str, Any]]:
    """Return whether the sharded model of a type equals the whole model: a `Verdict`, as a dictionary, per world size.

    Args:
        model_type: name of the type, from its configuration.
        world_sizes: numbers of ranks.
        varied: whether to judge a model of other sizes than the twin that proved its policies.
    """
    start = time.monotonic()
    try:
        twin = twin_of(model_type, varied)
    except Exception as error:  # failures of the whole model say nothing about cuts
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        seconds, name = time.monotonic() - start, classes_of(model_type)[0]
        return [asdict(Verdict(model_type, name, size, "skipped", reason, seconds=seconds)) for size in world_sizes]
    verdicts = []
    for size in world_sizes:
        start = time.monotonic()
        verdict = Verdict(model_type, type(twin.model).__name__, size, "equal")
        _compare(twin, verdict)
        verdict.seconds = round(time.monotonic() - start, 2)
        verdicts.append(asdict(verdict))
    return verdicts


def twin_of(model_type: str, varied: bool) -> Twin:
    """Return a twin of the first class of the type that can be built, because some classes need missing packages."""
    config = configuration(model_type, CONFIG_MAPPING_NAMES[model_type])
    problems = []
    for name in classes_of(model_type):
        try:
            return (varied_twin if varied else make_twin)(getattr(transformers, name), config, seed=SEED)
        except UnsupportedModelError as error:
            problems.append(error)
    raise problems[0]


def _compare(twin: Twin, verdict: Verdict) -> None:
    size = verdict.world_size
    try:
        selection = select(twin.model, world_size=size)
        share = build_plan(twin.model, size, selection).cut_share
        plan = build_plan(twin.model, size, selection, exhaustive=True)  # at full size more layers are large
    except (UnsupportedModelError, PolicyError) as error:
        verdict.status, verdict.reason = "refused", str(error)[:400]
        return
    verdict.source, verdict.share = plan.source, round(share, 4)
    with draws_of_each_thread():  # not around the proofs in `select`, whose ranks draw from torch's generator
        _compare_by(plan, twin, verdict)


def _compare_by(plan: ShardPlan, twin: Twin, verdict: Verdict) -> None:
    """Compare the outputs of the whole model with those of its shards under `plan`."""
    size = verdict.world_size
    twin = replace(twin, probes=comparable_probes(twin, plan))
    if not twin.probes:
        verdict.status, verdict.reason = "skipped", f"no known inputs reach what is cut: {twin.unreached[:300]}"
        return
    wanted = _Answers([probe.expected for probe in twin.probes], generate(twin, sharing_copy(twin.model)))
    parts = ["layers" if p.path in twin.single_layers else "parts" if p.path else "forward" for p in twin.probes]
    compared = {*parts, *wanted.tokens}
    try:
        answers = run_ranks(size, lambda communicator: _answers(twin, plan, communicator, set(wanted.tokens)))
    except Exception as error:  # an error of a rank alone is as wrong as other numbers
        verdict.status, verdict.reason = "wrong", f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        return
    verdict.compared = ", ".join(sorted(compared))
    for got in answers:
        if problem := _problem(twin, got, wanted):
            verdict.status, verdict.reason = "wrong", problem
            return


@dataclass
class _Answers:
    """The results of a model on its probes.

    Attributes:
        outputs: tensors of the output, for each probe.
        tokens: way of decoding → tokens.
    """

    outputs: list[list[torch.Tensor]]
    tokens: dict[str, torch.Tensor]


def _answers(twin: Twin, plan: ShardPlan, communicator: Communicator, decodings: set[str]) -> _Answers:
    """Return the results of one rank."""
    share = cut(twin.model, plan, communicator.rank, communicator)
    with torch.no_grad():
        outputs = [run(share.get_submodule(probe.path), probe.inputs) for probe in twin.probes]
    generating = [module for module in share.modules() if isinstance(module, GenerationMixin)]
    with agreed_criteria(generating, communicator, sequence=1):
        return _Answers(outputs, generate(twin, share, decodings))


def _problem(twin: Twin, got: _Answers, wanted: _Answers) -> str:
    """Return the first difference, in words; "" if there is none."""
    for probe, mine, whole in zip(twin.probes, got.outputs, wanted.outputs, strict=True):
        if len(mine) != len(whole):
            return f"{probe.path or 'forward'}: {len(mine)} tensors instead of {len(whole)}"
        gap = max((difference(g, w) for g, w in zip(mine, whole, strict=True)), default=0.0)
        if gap > TOLERANCE:
            return f"{probe.path or 'forward'}: differs by {gap:.2g}"
    for name, tokens in wanted.tokens.items():
        if not torch.equal(got.tokens[name], tokens):
            return f"{name} decoding gives other tokens"
    return ""
