"""The twin proof: a policy nobody wrote is accepted only if a tiny twin gives, cut, what it gives whole.

The ranks are threads. Void proofs do not count: each shard that is cut must have a part in the outputs that are
compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inference import Proposal, policies_of, propose
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.native import native_proposals
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Rule
from parallelformers_ng.sharding.selection import Selection, written_places
from parallelformers_ng.sharding.structure import called_layers
from parallelformers_ng.sharding.twin import Twin, equal, make_twin, run
from parallelformers_ng.sharding.vocabulary import find_vocabulary

_TOKENS = 10
_TRIALS = 60


@dataclass
class Proof:
    """What a twin proof found.

    Attributes:
        selection: the policies to use, those that were there before included.
        tried: what was tried and did not hold, for people.
        unproven: parts that the twin's inputs did not reach, so that they stay whole.
    """

    selection: Selection
    tried: list[str] = field(default_factory=list)
    unproven: str = ""


_CACHE: dict[tuple[Any, ...], Proof | UnsupportedModelError] = {}


def prove(model: PreTrainedModel, base: Selection, world_size: int) -> Proof:
    """Find and prove policies for the blocks that `base` leaves.

    Args:
        model: the model, on any device; only its class and configuration are looked at.
        base: policies that apply already, possibly none.
        world_size: ranks to prove it for, at least 1.

    Raises:
        UnsupportedModelError: no twin could be made, or nothing that was proposed held.
    """
    attention = getattr(model.config, "_attn_implementation", None)
    shape = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    key = (type(model), shape, attention, transformers.__version__, world_size, base.policies)
    if key not in _CACHE:
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched gradients off
            _CACHE[key] = _find(model, base, world_size, attention)
    found = _CACHE[key]
    if isinstance(found, UnsupportedModelError):
        raise found
    return found


def check(model: PreTrainedModel, selection: Selection, world_size: int) -> str:
    """Prove policies that were written: "" where a twin gives, cut by them, what it gives whole, else what it gave.

    Raises:
        UnsupportedModelError: no twin could be made.
    """
    with torch.inference_mode(False), torch.enable_grad():
        twin = make_twin(type(model), model.config, getattr(model.config, "_attn_implementation", None))
        search = _Search(twin, selection, world_size)
        return "" if search.holds([], selection.vocabulary) else search.last


def _find(
    model: PreTrainedModel, base: Selection, world_size: int, attention: str | None
) -> Proof | UnsupportedModelError:
    try:
        twin = make_twin(type(model), model.config, attention)
    except UnsupportedModelError as error:
        # Written policies need no proof; what they leave stays whole, as the plan says.
        return Proof(base, unproven=str(error)) if base.policies else error
    try:
        return _Search(twin, base, world_size).result()
    except UnsupportedModelError as error:
        return error


class _Search:
    """Tries all proposals together, then each alone, cutting less where one does not hold."""

    def __init__(self, twin: Twin, base: Selection, world_size: int) -> None:
        self.twin, self.base, self.world_size = twin, base, world_size
        self.tried: list[str] = []
        self.trials = 0
        self.last = ""

    def result(self) -> Proof:
        covered = written_places(self.twin.model, self.base.policies)
        live = set(self.twin.gradients)
        vocabulary_layers = self._vocabulary()
        layers = [
            layer
            for layer in called_layers(self.twin.model, self.twin.calls, live)
            if not any(layer.name == path or layer.name.startswith(path + ".") for path in covered)
            and layer.name not in vocabulary_layers
        ]
        native = native_proposals(self.twin.model, layers)
        inferred = propose(self.twin.model, layers, live)
        inferred = [p for p in inferred if not _beneath(p, self.twin.model, covered)]
        proposals = _merge(native, inferred)
        vocabulary = self.holds([], True)
        if not vocabulary:
            self.note("the vocabulary")
            if not self.holds([], False):
                raise UnsupportedModelError(
                    f"{type(self.twin.model).__name__}: even with nothing more cut, its twin gives other values"
                    f" on {self.world_size} ranks ({self.last}); report it"
                )
        chosen = self.choose(proposals, vocabulary)
        self.check_tokens(chosen, vocabulary)
        if not chosen and not self.base.policies and not vocabulary:
            raise UnsupportedModelError(
                f"no policy knows {type(self.twin.model).__name__}, and none could be inferred: tried"
                f" {'; '.join(self.tried) or 'nothing, as no layer of it was reached'}. Write one (POLICY.md shows how)"
            )
        policies = policies_of((p.block, rules) for p, rules in chosen)
        sources = [self.base.source] if self.base.policies else []
        from_native = [any(proposal is p for p in native) for proposal, _ in chosen]
        if any(from_native):
            sources.append("native plan")
        if not all(from_native) or not sources:
            sources.append("inferred")
        selection = Selection((*self.base.policies, *policies), "+".join(sources), vocabulary)
        return Proof(selection, self.tried, self.twin.untold)

    # -- search --------------------------------------------------------------------------------------------------

    def choose(self, proposals: Sequence[Proposal], vocabulary: bool) -> list[tuple[Proposal, dict[str, Rule]]]:
        first: list[tuple[Proposal, dict[str, Rule]]] = []
        for proposal in proposals:
            first += [(p, p.variants[0]) for p in ([proposal] if proposal.variants else proposal.one_by_one())]
        if first and self.holds(first, vocabulary):
            return first
        chosen: list[tuple[Proposal, dict[str, Rule]]] = []
        singles: list[tuple[Proposal, dict[str, Rule]]] = []
        for proposal in proposals:
            if proposal.kind == "gathered":
                singles.append((proposal, proposal.variants[0]))
                continue
            held = next((rules for rules in proposal.variants if self.holds([(proposal, rules)], vocabulary)), None)
            if held is not None:
                chosen.append((proposal, held))
                continue
            self.note(f"{proposal.kind} of {proposal.block}")
            singles += [(single, single.variants[0]) for single in proposal.one_by_one()]
        singles = self.bisect(singles, vocabulary)
        for attempt in ([*chosen, *singles], chosen, singles):
            if attempt and self.holds(attempt, vocabulary):
                return attempt
        return []

    def bisect(
        self, parts: list[tuple[Proposal, dict[str, Rule]]], vocabulary: bool
    ) -> list[tuple[Proposal, dict[str, Rule]]]:
        """Those of many small proposals that hold."""
        if not parts or self.holds(parts, vocabulary):
            return parts
        if len(parts) == 1:
            self.note(f"{parts[0][0].block}.{next(iter(parts[0][1]))}, gathered")
            return []
        middle = len(parts) // 2
        return self.bisect(parts[:middle], vocabulary) + self.bisect(parts[middle:], vocabulary)

    def note(self, what: str) -> None:
        self.tried.append(f"{what} ({self.last})")

    # -- one trial -----------------------------------------------------------------------------------------------

    def holds(self, parts: Sequence[tuple[Proposal, dict[str, Rule]]], vocabulary: bool) -> bool:
        """Whether the twin, cut so, gives what it gives whole, and every shard that is cut has a part in it."""
        self.trials += 1
        if self.trials > _TRIALS:
            self.last = "too many trials"
            return False
        policies = policies_of((p.block, rules) for p, rules in parts)
        selection = Selection((*self.base.policies, *policies), "inferred", vocabulary)
        try:
            plan = build_plan(self.twin.model, self.world_size, selection)
            self.last = _idle_shard(plan, self.twin, {path for p, rules in parts for path in rules})
            if self.last:
                return False
            for probe in self.twin.probes:
                results = run_ranks(self.world_size, self._body(plan, probe.path, probe.inputs))
                for got in results:
                    if not equal(got, probe.wanted, self.twin.tolerance):
                        self.last = "its outputs differ"
                        return False
        except Exception as error:  # a wrong cut may fail anywhere in the modelling code; that is what a trial is for
            self.last = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
            return False
        return True

    def _body(self, plan: ShardPlan, path: str, inputs: dict[str, Any]) -> Callable[[Communicator], list[torch.Tensor]]:
        def body(communicator: Communicator) -> list[torch.Tensor]:
            share = cut(self.twin.model, plan, communicator.rank, communicator)
            with torch.no_grad():
                return run(share.get_submodule(path), inputs)

        return body

    def check_tokens(self, chosen: list[tuple[Proposal, dict[str, Rule]]], vocabulary: bool) -> None:
        """Decode past any window; where tokens differ, attention is cut no more but its layers gathered."""
        inputs = self._prompt()
        if inputs is None:
            return
        if self._same_tokens(chosen, vocabulary, *inputs):
            return
        self.note("decoding with attention cut by heads")
        less = [(p, rules) for p, rules in chosen if p.kind != "attention"]
        less += [(s, s.variants[0]) for p, _ in chosen if p.kind == "attention" for s in p.one_by_one()]
        if not (self.holds(less, vocabulary) and self._same_tokens(less, vocabulary, *inputs)):
            self.note("decoding with everything gathered")
            raise UnsupportedModelError(
                f"{type(self.twin.model).__name__}: cut on {self.world_size} ranks, its twin generates other tokens;"
                f" tried {'; '.join(self.tried)}"
            )
        chosen[:] = less

    def _prompt(self) -> tuple[dict[str, Any], torch.Tensor] | None:
        """What to generate from, and the tokens of the whole model; None where it does not generate so."""
        probe = self.twin.probes[0]
        if probe.path or not self.twin.model.can_generate():
            return None
        inputs = {name: value for name, value in probe.inputs.items() if not name.startswith("decoder_")}
        try:
            return inputs, self._generate(self.twin.model, inputs)
        except Exception as error:  # its generation needs more than its forward does; the forward was compared
            self.last = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
            return None

    def _generate(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        options = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False, "num_beams": 1}
        given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        return model.generate(**given, **options)  # type: ignore[operator]

    def _same_tokens(
        self, chosen: Sequence[tuple[Proposal, dict[str, Rule]]], vocabulary: bool, inputs: dict[str, Any], wanted: Any
    ) -> bool:
        policies = policies_of((p.block, rules) for p, rules in chosen)
        selection = Selection((*self.base.policies, *policies), "inferred", vocabulary)
        plan = build_plan(self.twin.model, self.world_size, selection)

        def body(communicator: Communicator) -> Any:
            return self._generate(cut(self.twin.model, plan, communicator.rank, communicator), inputs)

        try:
            results = run_ranks(self.world_size, body)
        except Exception as error:  # as in `holds`
            self.last = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
            return False
        self.last = "its tokens differ"
        return all(torch.equal(got, wanted) for got in results if isinstance(got, torch.Tensor))

    def _vocabulary(self) -> set[str]:
        return {layer.path for layer in find_vocabulary(self.twin.model, taken=set())}


def _idle_shard(plan: ShardPlan, twin: Twin, paths: set[str]) -> str:
    """The first shard of an unwritten rule on which no output depends, in words; "" where all count."""
    for tensor in plan.stored():
        gradient = twin.gradients.get(tensor.name)
        if tensor.is_replicated or tensor.is_buffer or tensor.rule == "vocabulary":
            continue
        if not any(f"'{path}'" in tensor.rule and "Inferred" in tensor.rule for path in paths):
            continue
        if gradient is None:
            if tensor.name.endswith("bias"):
                continue
            return f"void: no output depends on {tensor.name}"
        for rank, shard in enumerate(tensor.shards):
            if not shard.zero and not bool(shard.of(gradient).any()) and shard.of(gradient).numel():
                return f"void: no output depends on rank {rank}'s part of {tensor.name}"
    return ""


def _merge(native: Sequence[Proposal], inferred: Sequence[Proposal]) -> list[Proposal]:
    """The native proposals, then the inferred ones for layers that those leave."""
    taken = {(p.block, path) for p in native for path in p.paths}
    return [*native, *(p for p in inferred if not any((p.block, path) in taken for path in p.paths))]


def _beneath(proposal: Proposal, model: nn.Module, covered: set[str]) -> bool:
    """Whether a proposal's block is one that a written policy describes."""
    if not covered:
        return False
    named = [name for name, module in model.named_modules() if type(module).__name__ == proposal.block]
    return any(name == path or name.startswith(path + ".") for name in named for path in covered if path)
