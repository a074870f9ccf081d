"""Trials on a twin: cut so, does it give what it gives whole?

The ranks are threads. Void trials do not count: each shard that is cut must have a part in the outputs that are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from parallelformers_ng.autopolicy.proposal import Proposal, policies_of
from parallelformers_ng.autopolicy.twin import Probe, Twin, equal, lengths, run, spare
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.plan import ShardPlan, TensorPlan
from parallelformers_ng.sharding.registry import Selection
from parallelformers_ng.sharding.rules import Rule
from parallelformers_ng.sharding.structure import tensors

Choice = tuple[Proposal, dict[str, Rule]]
"""A proposal and the variant of its rules that is tried."""

_TOKENS = 6
_TRIALS = 60


class Trials:
    """Tries choices of rules on one twin.

    Attributes:
        twin: the twin.
        base: the policies that apply in every trial.
        world_size: number of ranks.
        last: why the latest trial did not hold, or "".
    """

    def __init__(self, twin: Twin, base: Selection, world_size: int) -> None:
        self.twin, self.base, self.world_size = twin, base, world_size
        self.last = ""
        self._count = 0

    def hold(self, choices: Sequence[Choice], vocabulary: bool, leftovers: bool = False) -> bool:
        """Whether the twin, cut so, gives what it gives whole, and every shard that is cut has a part in it."""
        self._count += 1
        if self._count > _TRIALS:
            self.last = "too many trials"
            return False
        try:
            plan = self._plan(choices, vocabulary, leftovers)
            self.last = _idle_shard(plan, self.twin, {path for _, rules in choices for path in rules})
            if self.last:
                return False
            probes = telling(self.twin, plan)
            results = run_ranks(self.world_size, self._on_each_rank(plan, lambda share: _outputs(share, probes)))
        except Exception as error:  # a wrong cut may fail anywhere in the modelling code; that is what a trial is for
            self.last = _in_short(error)
            return False
        wanted = [probe.wanted for probe in probes]
        for got in results:
            if not all(equal(g, w, self.twin.tolerance) for g, w in zip(got, wanted, strict=True)):
                self.last = "its outputs differ"
                return False
        return True

    def is_idle(self, choices: Sequence[Choice], vocabulary: bool) -> bool:
        """Whether some shard would have no part in what the twin gives. Nothing is run."""
        plan = self._plan(choices, vocabulary)
        return bool(_idle_shard(plan, self.twin, {path for _, rules in choices for path in rules}))

    def prompt(self) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """What to generate from, and the tokens of the whole model; None where it does not generate so."""
        if not self.twin.runs_whole or not self.twin.model.can_generate():
            return None
        probe = self.twin.probes[0]
        inputs = {name: value for name, value in probe.inputs.items() if not name.startswith("decoder_")}
        try:
            return inputs, _generate(spare(self.twin.model), inputs)
        except Exception as error:  # its generation needs more than its forward does; the forward was compared
            self.last = _in_short(error)
            return None

    def same_tokens(
        self, choices: Sequence[Choice], vocabulary: bool, inputs: dict[str, Any], wanted: list[torch.Tensor]
    ) -> bool:
        """Whether the twin, cut so, decodes the tokens `wanted` past any window."""
        plan = self._plan(choices, vocabulary)
        try:
            results = run_ranks(self.world_size, self._on_each_rank(plan, lambda share: _generate(share, inputs)))
        except Exception as error:  # as in `hold`
            self.last = _in_short(error)
            return False
        self.last = "its tokens differ"
        return all(equal(got, wanted, self.twin.tolerance) for got in results)

    def _plan(self, choices: Sequence[Choice], vocabulary: bool, leftovers: bool = False) -> ShardPlan:
        policies = policies_of((proposal.block, rules) for proposal, rules in choices)
        selection = Selection((*self.base.policies, *policies), "inferred", vocabulary, leftovers)
        return build_plan(self.twin.model, self.world_size, selection, exhaustive=True)

    def _on_each_rank(self, plan: ShardPlan, body: Callable[[nn.Module], Any]) -> Callable[[Communicator], Any]:
        def on_rank(communicator: Communicator) -> Any:
            share = cut(self.twin.model, plan, communicator.rank, communicator)
            with torch.no_grad():
                return body(share)

        return on_rank


def telling(twin: Twin, plan: ShardPlan) -> list[Probe]:
    """The probes on which a twin cut by `plan` should give what it gives whole.

    A single layer that a policy cuts within its block gives, by itself, a part of what it gives whole.
    """
    parts_only = {layer.path for layer in plan.layers if layer.takes_part != layer.gives_part}
    return [probe for probe in twin.probes if probe.path not in twin.lone or probe.path not in parts_only]


def unreached(plan: ShardPlan, twin: Twin) -> list[str]:
    """The rules of which no cut tensor has a part in the outputs, so that a trial says nothing about them."""
    reached: dict[str, bool] = {}
    for tensor in plan.stored():
        if not tensor.is_replicated and not tensor.is_buffer:
            reached[tensor.rule] = reached.get(tensor.rule, False) or tensor.name in twin.gradients
    return [rule for rule, seen in reached.items() if not seen]


def _outputs(share: nn.Module, probes: Sequence[Probe]) -> list[list[torch.Tensor]]:
    return [run(share.get_submodule(probe.path), probe.inputs) for probe in probes]


def _generate(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Tokens, and whatever else it returns: speech, for one."""
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return list(tensors(model.generate(**given, **lengths(model, _TOKENS), do_sample=False, num_beams=1)))


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:160]


def _idle_shard(plan: ShardPlan, twin: Twin, paths: set[str]) -> str:
    """The first shard of an unwritten rule on which no output depends, in words; "" where all count.

    Blocks of one class compute alike, so one of those that a rule cuts is enough: no router chooses all experts.
    """
    alike: dict[tuple[str, str], list[TensorPlan]] = {}
    for tensor in plan.stored():
        if tensor.is_replicated or tensor.is_buffer or tensor.rule == "vocabulary":
            continue
        if any(f"'{path}'" in tensor.rule and "Inferred" in tensor.rule for path in paths):
            alike.setdefault((tensor.rule, tensor.name.rpartition(".")[2]), []).append(tensor)
    for (_, name), cut_alike in alike.items():
        seen = [(t.shards, twin.gradients[t.name]) for t in cut_alike if t.name in twin.gradients]
        if not seen:
            if name == "bias":
                continue
            return f"void: no output depends on {cut_alike[0].name}"
        for rank in range(plan.world_size):
            parts = [shards[rank].of(gradient) for shards, gradient in seen if not shards[rank].zero]
            if any(part.numel() for part in parts) and not any(bool(part.any()) for part in parts):
                return f"void: no output depends on rank {rank}'s part of {cut_alike[0].name}"
    return ""
