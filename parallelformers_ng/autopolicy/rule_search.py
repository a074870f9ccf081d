"""Searches for rules that pass on a twin: all proposals together, then each alone, then parts of failed proposals."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelformers_ng.autopolicy.inference import propose
from parallelformers_ng.autopolicy.proposal import Proposal, policies_of
from parallelformers_ng.autopolicy.trials import Choice, Trials
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.experts import has_experts_interface
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.policy_registry import written_places
from parallelformers_ng.sharding.rules import Column, Experts, Rule
from parallelformers_ng.sharding.structure import called_layers, places
from parallelformers_ng.sharding.vocabulary import find_vocabulary

# A layer with less than one in 5000 of the parameters stays whole, because a gather would cost more than it saves.
_SMALL = 5000


class RuleSearch:
    """A search for rules for one number of ranks."""

    def __init__(self, trials: Trials, chosen: Sequence[Choice] = (), vocabulary: bool = True) -> None:
        self.trials = trials
        self.model = trials.twin.model
        self.tried: list[str] = []  # failed attempts with reasons, as text
        self.chosen = list(chosen)  # rules that passed, after `result`
        self._vocabulary = vocabulary

    def result(self) -> Selection:
        """Run the search, and return the inferred policies together with the base policies."""
        covered = written_places(self.model, self.trials.base.policies)
        single = set(self.trials.twin.single_layers)
        live = {name for name in self.trials.twin.gradients if name.rpartition(".")[0] not in single}
        vocabulary_layers = set(find_vocabulary(self.model))
        layers = [
            layer
            for layer in called_layers(self.model, self.trials.twin.calls, live)
            if not _lies_in(layer.name, covered) and layer.name not in vocabulary_layers
        ]
        proposals = [p for p in propose(self.model, layers, live) if not _is_covered(p, self.model, covered)]
        alone = self.single_layers(proposals, covered | vocabulary_layers)
        chosen, vocabulary = self.chosen or [*_first_variants(proposals), *alone], self._vocabulary
        if self.chosen and self.trials.has_unused_shard(chosen, vocabulary):  # more ranks may have empty shards
            chosen = [choice for choice in chosen if not self.trials.has_unused_shard([choice], vocabulary)]
        if not self.trials.match(chosen, vocabulary):
            vocabulary = self.vocabulary_holds()
            chosen = self.choose(proposals, vocabulary)
            chosen = [*chosen, *self.bisect(alone, vocabulary, chosen)]
        self.check_tokens(chosen, vocabulary)
        self.chosen = chosen
        leftovers = self.trials.match(chosen, vocabulary, leftovers=True)
        if not leftovers:
            self.note("other large tensors")
        if not chosen and not self.trials.base.policies and not vocabulary:
            raise UnsupportedModelError(
                f"no policy knows {type(self.model).__name__}, and none could be inferred: tried"
                f" {'; '.join(self.tried) or 'nothing, because no inputs reached a layer'}. Write a policy (POLICY.md"
                " shows how)"
            )
        policies = policies_of((p.block, rules) for p, rules in chosen)
        sources = [self.trials.base.source] if self.trials.base.policies else []
        if chosen or not sources:
            sources.append("inferred")
        base = self.trials.base
        return Selection((*base.policies, *policies), "+".join(sources), vocabulary, leftovers, base.customs)

    def single_layers(self, proposals: Sequence[Proposal], covered: set[str]) -> list[Choice]:
        """Return rules for layers that only a probe of a single layer reaches.

        Experts are sharded along their width; other layers become column-parallel with gathered outputs. A layer with
        less than 1/5000 of the model's parameters gets no rule.
        """
        where = places(self.model)
        taken = {(proposal.block, path) for proposal in proposals for path in proposal.paths}
        choices: dict[tuple[str, str], Choice] = {}
        total = sum(parameter.numel() for parameter in self.model.parameters())
        for name in self.trials.twin.single_layers:
            place, layer = where[name], self.model.get_submodule(name)
            is_small = sum(p.numel() for p in layer.parameters()) * _SMALL < total
            if is_small or (place.block, place.path) in taken or _lies_in(name, covered):
                continue
            experts = has_experts_interface(layer)
            rule: Rule = Experts() if experts else Column("column", gather=True)
            single = Proposal(place.block, "experts" if experts else "gathered", ({place.path: rule},))
            choices[place.block, place.path] = (single, single.variants[0])
        return list(choices.values())

    # -- search --------------------------------------------------------------------------------------------------

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

    def choose(self, proposals: Sequence[Proposal], vocabulary: bool) -> list[Choice]:
        """Return the proposals that pass both alone and together, each with a variant; note failures in `tried`."""
        chosen: list[Choice] = []
        singles: list[Choice] = []
        for proposal in proposals:
            if proposal.kind == "gathered":
                singles.append((proposal, proposal.variants[0]))
                continue
            choice = next(
                (rules for rules in proposal.variants if self.trials.match([(proposal, rules)], vocabulary)), None
            )
            if choice is not None:
                chosen.append((proposal, choice))
                continue
            self.note(f"{proposal.kind} of {proposal.block}")
            singles += [(single, single.variants[0]) for single in proposal.one_by_one()]
        singles = self.bisect(singles, vocabulary)
        for attempt in ([*chosen, *singles], chosen, singles):
            if attempt and self.trials.match(attempt, vocabulary):
                return attempt
        return []

    def bisect(self, parts: list[Choice], vocabulary: bool, beside: Sequence[Choice] = ()) -> list[Choice]:
        if not parts or self.trials.match([*beside, *parts], vocabulary):
            return parts
        if len(parts) == 1:
            self.note(f"{parts[0][0].block}.{next(iter(parts[0][1]))}, gathered")
            return []
        middle = len(parts) // 2
        first = self.bisect(parts[:middle], vocabulary, beside)
        return first + self.bisect(parts[middle:], vocabulary, [*beside, *first])

    def note(self, attempt: str) -> None:
        """Add an attempt to `tried`, with the failure of the latest trial."""
        self.tried.append(f"{attempt} ({self.trials.failure})")

    def check_tokens(self, chosen: list[Choice], vocabulary: bool) -> None:
        """Generate more tokens than any sliding window holds, and compare the tokens of the sharded and the whole twin.

        If the tokens differ, replace the rules of attention in `chosen` by column-parallel rules with gathered outputs.
        """
        inputs = self.trials.prompt()
        if inputs is None or self.trials.same_tokens(chosen, vocabulary, *inputs):
            return
        self.note("decoding with attention sharded by heads")
        gathered = [(p, rules) for p, rules in chosen if p.kind != "attention"]
        gathered += [(s, s.variants[0]) for p, _ in chosen if p.kind == "attention" for s in p.one_by_one()]
        if not (self.trials.match(gathered, vocabulary) and self.trials.same_tokens(gathered, vocabulary, *inputs)):
            self.note("decoding with gathered attention layers")
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: on {self.trials.world_size} ranks, its twin generates other tokens than"
                f" whole; tried {'; '.join(self.tried)}"
            )
        chosen[:] = gathered


def _first_variants(proposals: Sequence[Proposal]) -> list[Choice]:
    choices: list[Choice] = []
    for proposal in proposals:
        choices += [(p, p.variants[0]) for p in ([proposal] if proposal.variants else proposal.one_by_one())]
    return choices


def _is_covered(proposal: Proposal, model: nn.Module, covered: set[str]) -> bool:
    named = (name for name, module in model.named_modules() if type(module).__name__ == proposal.block)
    return any(_lies_in(name, covered - {""}) for name in named)


def _lies_in(name: str, paths: set[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in paths)
