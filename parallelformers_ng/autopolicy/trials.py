"""Runs a twin sharded by some rules, and compares the outputs with the outputs of the whole twin.

The ranks are threads. If no output depends on a shard, the trial proves nothing about the shard, and fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from parallelformers_ng.autopolicy.own_draws import OwnDraws
from parallelformers_ng.autopolicy.proposal import Proposal, policies_of
from parallelformers_ng.autopolicy.twin import Twin, TwinProbe, equal, failure_of, length_options, sharing_copy
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.own_heads import gathered
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.structure import tensors
from parallelformers_ng.sharding.tensor_plan import TensorPlan

T = TypeVar("T")
_TOKENS = 6
_TRIALS = 60


class Trials:
    """The trials of rules on one twin.

    An object allows 60 calls of `match`; every further call returns False.

    Attributes:
        twin: the twin.
        base: policies that every trial applies.
        world_size: number of ranks.
        parts: fraction of the twin for each rank, with the sum 1; empty for equal fractions.
    """

    def __init__(self, twin: Twin, base: Selection, world_size: int, parts: Sequence[float] = ()) -> None:
        self.twin, self.base, self.world_size, self.parts = twin, base, world_size, parts
        # why the latest trial failed; "" after `match` has returned True, and undefined after `same_tokens` has
        self.failure = ""
        self._count = 0

    def match(self, choices: Sequence[Proposal], vocabulary: bool, leftovers: bool = False) -> bool:
        """Return whether the outputs of the sharded and the whole twin match, and depend on the rules' shards.

        An exception of a rule or of the modelling code counts as a mismatch. The method sets `failure`.
        """
        self._count += 1
        self.failure = "too many trials" if self._count > _TRIALS else self._mismatch(choices, vocabulary, leftovers)
        return not self.failure

    def _mismatch(self, choices: Sequence[Proposal], vocabulary: bool, leftovers: bool) -> str:
        try:
            plan = self.plan(choices, vocabulary, leftovers)
            if unused := _unused_shard(plan, self.twin, choices):
                return unused
            probes = comparable_probes(self.twin, plan)
            results = on_each_rank(self.twin.model, plan, lambda share: [probe.run_in(share) for probe in probes])
        except Exception as error:  # a wrong rule may fail anywhere in the modelling code
            return failure_of(error)
        expected = [probe.expected for probe in probes]
        pairs = (pair for outputs in results for pair in zip(outputs, expected, strict=True))
        return "" if all(equal(*pair, self.twin.tolerance) for pair in pairs) else "its outputs differ"

    def objection(self) -> str:
        vocabulary, leftovers = self.base.vocabulary, self.base.leftovers
        holds = self.match([], vocabulary, leftovers) and self.same_tokens([], vocabulary)
        return "" if holds else self.failure

    def has_unused_shard(self, choices: Sequence[Proposal], vocabulary: bool) -> bool:
        return bool(_unused_shard(self.plan(choices, vocabulary), self.twin, choices))

    @functools.cached_property
    def prompt(self) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Return inputs for `generate` and the outputs of the whole twin; None if the twin cannot generate.

        The outputs are the tokens, six of them new, and for some models speech. If `generate` raises an exception, or
        if two runs give different outputs because the model draws random numbers, the result is None, and `failure` has
        the reason.
        """
        if not self.twin.runs_whole or not self.twin.model.can_generate():
            return None
        forward_inputs = self.twin.probes[0].inputs
        inputs = {name: value for name, value in forward_inputs.items() if not name.startswith("decoder_")}
        try:
            with OwnDraws(0) as draws:
                outputs = _generate(sharing_copy(self.twin.model), inputs)
            if draws.has_drawn:  # the ranks are threads, which would share one generator
                with OwnDraws(1):
                    again = _generate(sharing_copy(self.twin.model), inputs)
                if not equal(again, outputs, self.twin.tolerance):
                    self.failure = "its greedy tokens are random"
                    return None
        except Exception as error:  # `generate` may need more inputs than the forward
            self.failure = failure_of(error)
            return None
        return inputs, outputs

    def same_tokens(self, choices: Sequence[Proposal], vocabulary: bool) -> bool:
        """Return whether the sharded twin generates the same six tokens as the whole twin, greedily. Sets `failure`.

        True if the twin cannot generate.
        """
        if self.prompt is None:
            return True
        inputs, wanted = self.prompt
        try:
            plan = self.plan(choices, vocabulary)
            results = on_each_rank(self.twin.model, plan, lambda share: _generate(share, inputs))
        except Exception as error:  # a wrong rule may fail anywhere in the modelling code
            self.failure = failure_of(error)
            return False
        self.failure = "its tokens differ"
        return all(equal(got, wanted, self.twin.tolerance) for got in results)

    def plan(self, choices: Sequence[Proposal], vocabulary: bool, leftovers: bool = False) -> ShardPlan:
        policies, base = policies_of(choices), self.base
        selection = Selection((*base.policies, *policies), "inferred", vocabulary, leftovers, base.customs, proven=True)
        return build_plan(self.twin.model, self.world_size, selection, exhaustive=True, parts=self.parts)


def on_each_rank(model: nn.Module, plan: ShardPlan, body: Callable[[Any], T]) -> list[T]:
    """Return the results of a function, in rank order, for the shards of a small model. The ranks are threads."""

    def on_rank(communicator: Communicator) -> T:
        share = cut(model, plan, communicator.rank, communicator)
        with torch.no_grad():
            return body(share)

    return run_ranks(plan.world_size, on_rank)


def comparable_probes(twin: Twin, plan: ShardPlan) -> list[TwinProbe]:
    """Return the tests of a twin in which the sharded and the whole module must have the same outputs.

    A test of one column-parallel or row-parallel layer is left out, because its output is only one rank's part.
    """
    parts_only = {layer.path for layer in plan.layers if layer.takes_part != layer.gives_part}
    return [probe for probe in twin.probes if probe.path not in twin.single_layers or probe.path not in parts_only]


def unproven_rules(plan: ShardPlan, twin: Twin) -> list[str]:
    """Return the rules whose tensors do not influence the outputs, so that a trial proves nothing about the rules."""
    sharded = [tensor for tensor in plan.stored() if not tensor.is_replicated and not tensor.is_buffer]
    reached = {tensor.rule for tensor in sharded if tensor.name in twin.gradients}
    return [tensor.rule for tensor in sharded if tensor.rule not in reached]


def _generate(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    arguments = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    output = model.generate(**arguments, **length_options(model, _TOKENS), do_sample=False, num_beams=1)
    return [gathered(tensor) for tensor in tensors(output)]  # gathering needs all ranks, so it is done here


def _unused_shard(plan: ShardPlan, twin: Twin, choices: Sequence[Proposal]) -> str:
    """Describe the first shard of an inferred rule on which no output of the twin depends; "" if there is none.

    All blocks of a class compute the same function. So outputs need to depend on the shard in one block only; in other
    blocks a router may leave out experts.
    """
    paths = {path for choice in choices for path in choice.rules}
    same_rule: dict[tuple[str, str], list[TensorPlan]] = {}
    for tensor in plan.stored():
        if tensor.is_replicated or tensor.is_buffer or tensor.rule == "vocabulary":
            continue
        if any(f"'{path}'" in tensor.rule and "Inferred" in tensor.rule for path in paths):
            same_rule.setdefault((tensor.rule, tensor.name.rpartition(".")[2]), []).append(tensor)
    for (_, name), group in same_rule.items():
        gradients = [(t.shards, twin.gradients[t.name]) for t in group if t.name in twin.gradients]
        if not gradients:
            if name == "bias":
                continue
            return f"void: no output depends on {group[0].name}"
        for rank in range(plan.world_size):
            parts = [shards[rank].of(gradient) for shards, gradient in gradients if not shards[rank].zero]
            if any(part.numel() for part in parts) and not any(bool(part.any()) for part in parts):
                return f"void: no output depends on rank {rank}'s part of {group[0].name}"
    return ""
