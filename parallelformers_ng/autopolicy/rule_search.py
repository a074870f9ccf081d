"""Searches for rules with which a twin's sharded outputs match: tries all proposals together, then each one alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelformers_ng.autopolicy.inference import propose
from parallelformers_ng.autopolicy.proposal import Proposal, experts_at, gathered_layer, policies_of
from parallelformers_ng.autopolicy.trials import Trials
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.experts import has_experts_interface
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.policy_registry import written_places
from parallelformers_ng.sharding.structure import Place, called_layers, places
from parallelformers_ng.sharding.vocabulary import find_vocabulary

# A layer with less than 1/5000 of the model's parameters stays whole: gathering its outputs costs more than it saves.
_SMALL = 5000


class RuleSearch:
    """A search for rules for one number of ranks."""

    def __init__(self, trials: Trials, chosen: Sequence[Proposal] = (), vocabulary: bool = True) -> None:
        self.trials = trials
        self.model = trials.twin.model
        self.tried: list[str] = []  # failed attempts with reasons, as text
        self.chosen = list(chosen)  # after `result`: the rules with which the outputs match
        self.vocabulary = vocabulary  # whether the vocabulary is sharded

    def result(self) -> Selection:
        """Run the search, and return the inferred policies together with the base policies."""
        base, twin = self.trials.base, self.trials.twin
        covered = written_places(self.model, base.policies)
        live = {name for name in twin.gradients if name.rpartition(".")[0] not in twin.single_layers}
        vocabulary_layers = set(find_vocabulary(self.model))
        layers = [
            layer
            for layer in called_layers(self.model, twin.calls, live)
            if not _lies_in(layer.name, covered) and layer.name not in vocabulary_layers
        ]
        proposals = [p for p in propose(self.model, layers, live) if not _is_covered(p, self.model, covered)]
        alone = self.single_layers(proposals, covered | vocabulary_layers)
        chosen = self.chosen or [*_first_variants(proposals), *alone]
        if self.chosen and self.trials.has_unused_shard(chosen, self.vocabulary):  # more ranks may get no columns
            chosen = [choice for choice in chosen if not self.trials.has_unused_shard([choice], self.vocabulary)]
        if not self.match(chosen):
            self.vocabulary = self.vocabulary_holds()
            chosen = self.choose(proposals)
            chosen = [*chosen, *self.bisect(alone, chosen)]
        self.chosen = chosen = self.with_same_tokens(chosen)
        leftovers = self.trials.match(chosen, self.vocabulary, leftovers=True)
        if not leftovers:
            self.note("other large tensors")
        if not chosen and not base.policies and not self.vocabulary:
            raise UnsupportedModelError(
                f"no policy knows {type(self.model).__name__}, and none could be inferred: tried"
                f" {'; '.join(self.tried) or 'nothing, because no inputs reached a layer'}. Write a policy (POLICY.md"
                " shows how)"
            )
        sources = [base.source] if base.policies else []
        if chosen or not sources:
            sources.append("inferred")
        policies = (*base.policies, *policies_of(chosen))
        return Selection(policies, "+".join(sources), self.vocabulary, leftovers, base.customs)

    def single_layers(self, proposals: Sequence[Proposal], covered: set[str]) -> list[Proposal]:
        """Return rules for layers that no run of the twin calls, and that were therefore run alone.

        Experts are sharded along their width; other layers become column-parallel with gathered outputs. A layer with
        less than 1/5000 of the model's parameters gets no rule.
        """
        where = places(self.model)
        taken = {Place(proposal.block, path) for proposal in proposals for path in proposal.paths}
        choices: dict[Place, Proposal] = {}
        total = sum(parameter.numel() for parameter in self.model.parameters())
        for name in self.trials.twin.single_layers:
            place, layer = where[name], self.model.get_submodule(name)
            is_small = sum(p.numel() for p in layer.parameters()) * _SMALL < total
            if not (is_small or place in taken or _lies_in(name, covered)):
                choices[place] = experts_at(place) if has_experts_interface(layer) else gathered_layer(place)
        return list(choices.values())

    def match(self, choices: Sequence[Proposal]) -> bool:
        return self.trials.match(choices, self.vocabulary)

    def vocabulary_holds(self) -> bool:
        if self.trials.match([], True):
            return True
        self.note("the vocabulary")
        if not self.trials.match([], False):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: even without inferred policies, its twin has other outputs"
                f" on {self.trials.world_size} ranks ({self.trials.failure}); report this error"
            )
        return False

    def choose(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Return the proposals with which the twin's outputs match, alone and together.

        Each proposal has the first of its variants with which the outputs match.
        """
        chosen: list[Proposal] = []
        singles: list[Proposal] = []
        for proposal in proposals:
            if proposal.kind == "gathered":
                singles.append(proposal)
            elif choice := next((each for each in proposal.alternatives() if self.match([each])), None):
                chosen.append(choice)
            else:
                self.note(f"{proposal.kind} of {proposal.block}")
                singles += proposal.one_by_one()
        singles = self.bisect(singles)
        for attempt in ([*chosen, *singles], chosen, singles):
            if attempt and self.match(attempt):
                return attempt
        return []

    def bisect(self, choices: list[Proposal], beside: Sequence[Proposal] = ()) -> list[Proposal]:
        if not choices or self.match([*beside, *choices]):
            return choices
        if len(choices) == 1:
            self.note(f"{choices[0].block}.{next(iter(choices[0].rules))}, gathered")
            return []
        middle = len(choices) // 2
        first = self.bisect(choices[:middle], beside)
        return first + self.bisect(choices[middle:], [*beside, *first])

    def note(self, attempt: str) -> None:
        """Add an attempt to `tried`, with the failure of the latest trial."""
        self.tried.append(f"{attempt} ({self.trials.failure})")

    def with_same_tokens(self, chosen: list[Proposal]) -> list[Proposal]:
        """Generate more tokens than any sliding window holds, and compare the tokens of the sharded and the whole twin.

        If the tokens differ, replace the rules of attention in `chosen` by column-parallel rules with gathered outputs.
        """
        if self.trials.same_tokens(chosen, self.vocabulary):
            return chosen
        self.note("decoding with attention sharded by heads")
        gathered = [p for p in chosen if p.kind != "attention"]
        gathered += [single for p in chosen if p.kind == "attention" for single in p.one_by_one()]
        if not (self.match(gathered) and self.trials.same_tokens(gathered, self.vocabulary)):
            self.note("decoding with gathered attention layers")
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: on {self.trials.world_size} ranks, its twin generates other tokens than"
                f" whole; tried {'; '.join(self.tried)}"
            )
        return gathered


def _first_variants(proposals: Sequence[Proposal]) -> list[Proposal]:
    return [first for proposal in proposals for first in proposal.alternatives()[:1] or proposal.one_by_one()]


def _is_covered(proposal: Proposal, model: nn.Module, covered: set[str]) -> bool:
    named = (name for name, module in model.named_modules() if type(module).__name__ == proposal.block)
    return any(_lies_in(name, covered - {""}) for name in named)


def _lies_in(name: str, paths: set[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in paths)
