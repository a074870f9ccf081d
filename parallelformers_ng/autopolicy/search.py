"""Searches for the rules that hold on a twin: all proposals together, then each alone, cutting less where one does
not hold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelformers_ng.autopolicy.inference import propose
from parallelformers_ng.autopolicy.proposal import Proposal, policies_of
from parallelformers_ng.autopolicy.trials import Choice, Trials
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.experts import has_experts_interface
from parallelformers_ng.sharding.registry import Selection, written_places
from parallelformers_ng.sharding.rules import Column, Experts, Rule
from parallelformers_ng.sharding.structure import called_layers, places
from parallelformers_ng.sharding.vocabulary import find_vocabulary

_SMALL = 5000
"""A layer with less than one part in so many of the parameters is not worth an exchange."""


class Search:
    """Tries all proposals together, then each alone, cutting less where one does not hold.

    Attributes:
        tried: what did not hold, for people.
        chosen: what held.

    Args:
        trials: on the twin.
        chosen: what held in another search on the same twin, which is tried first.
        vocabulary: whether the vocabulary was cut there.
    """

    def __init__(self, trials: Trials, chosen: Sequence[Choice] = (), vocabulary: bool = True) -> None:
        self.trials = trials
        self.model = trials.twin.model
        self.tried: list[str] = []
        self.chosen = list(chosen)
        self._vocabulary = vocabulary

    def result(self) -> Selection:
        """The policies that hold, those of the base included.

        Raises:
            UnsupportedModelError: nothing that was proposed holds.
        """
        covered = written_places(self.model, self.trials.base.policies)
        lone = set(self.trials.twin.lone)
        live = {name for name in self.trials.twin.gradients if name.rpartition(".")[0] not in lone}
        vocabulary_layers = {layer.path for layer in find_vocabulary(self.model, taken=set())}
        layers = [
            layer
            for layer in called_layers(self.model, self.trials.twin.calls, live)
            if not any(layer.name == path or layer.name.startswith(path + ".") for path in covered)
            and layer.name not in vocabulary_layers
        ]
        proposals = [p for p in propose(self.model, layers, live) if not _beneath(p, self.model, covered)]
        alone = self.lone_layers(proposals, covered | vocabulary_layers)
        chosen, vocabulary = self.chosen or [*_likeliest(proposals), *alone], self._vocabulary
        if self.chosen and self.trials.is_idle(chosen, vocabulary):  # on more ranks, of which some may have no part
            chosen = [choice for choice in chosen if not self.trials.is_idle([choice], vocabulary)]
        if not self.trials.hold(chosen, vocabulary):
            vocabulary = self.vocabulary_holds()
            chosen = self.choose(proposals, vocabulary)
            chosen = [*chosen, *self.bisect(alone, vocabulary, chosen)]
        self.check_tokens(chosen, vocabulary)
        self.chosen = chosen
        leftovers = self.trials.hold(chosen, vocabulary, leftovers=True)
        if not leftovers:
            self.note("what else is large")
        if not chosen and not self.trials.base.policies and not vocabulary:
            raise UnsupportedModelError(
                f"no policy knows {type(self.model).__name__}, and none could be inferred: tried"
                f" {'; '.join(self.tried) or 'nothing, as no layer of it was reached'}. Write one (POLICY.md shows how)"
            )
        policies = policies_of((p.block, rules) for p, rules in chosen)
        sources = [self.trials.base.source] if self.trials.base.policies else []
        if chosen or not sources:
            sources.append("inferred")
        return Selection((*self.trials.base.policies, *policies), "+".join(sources), vocabulary, leftovers)

    def lone_layers(self, proposals: Sequence[Proposal], covered: set[str]) -> list[Choice]:
        """For layers that nothing but a probe of their own reaches: gathered, or, being experts, cut by width."""
        where = places(self.model)
        taken = {(proposal.block, path) for proposal in proposals for path in proposal.paths}
        found: dict[tuple[str, str], Choice] = {}
        total = sum(parameter.numel() for parameter in self.model.parameters())
        for name in self.trials.twin.lone:
            place = where[name]
            if sum(p.numel() for p in self.model.get_submodule(name).parameters()) * _SMALL < total:
                continue
            if (place.block, place.path) in taken or any(name == c or name.startswith(c + ".") for c in covered):
                continue
            experts = has_experts_interface(self.model.get_submodule(name))
            rule: Rule = Experts() if experts else Column("column", gather=True)
            single = Proposal(place.block, "experts" if experts else "gathered", ({place.path: rule},))
            found[place.block, place.path] = (single, single.variants[0])
        return list(found.values())

    # -- search --------------------------------------------------------------------------------------------------

    def vocabulary_holds(self) -> bool:
        """Whether the base with the vocabulary cut holds; without it, it has to."""
        if self.trials.hold([], True):
            return True
        self.note("the vocabulary")
        if not self.trials.hold([], False):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: even with nothing more cut, its twin gives other values"
                f" on {self.trials.world_size} ranks ({self.trials.last}); report it"
            )
        return False

    def choose(self, proposals: Sequence[Proposal], vocabulary: bool) -> list[Choice]:
        """The proposals that hold, each tried alone and then together."""
        first = _likeliest(proposals)
        if first and not vocabulary and self.trials.hold(first, vocabulary):
            return first
        chosen: list[Choice] = []
        singles: list[Choice] = []
        for proposal in proposals:
            if proposal.kind == "gathered":
                singles.append((proposal, proposal.variants[0]))
                continue
            held = next(
                (rules for rules in proposal.variants if self.trials.hold([(proposal, rules)], vocabulary)), None
            )
            if held is not None:
                chosen.append((proposal, held))
                continue
            self.note(f"{proposal.kind} of {proposal.block}")
            singles += [(single, single.variants[0]) for single in proposal.one_by_one()]
        singles = self.bisect(singles, vocabulary)
        for attempt in ([*chosen, *singles], chosen, singles):
            if attempt and self.trials.hold(attempt, vocabulary):
                return attempt
        return []

    def bisect(self, parts: list[Choice], vocabulary: bool, beside: Sequence[Choice] = ()) -> list[Choice]:
        """Those of many small proposals that hold, `beside` others that do."""
        if not parts or self.trials.hold([*beside, *parts], vocabulary):
            return parts
        if len(parts) == 1:
            self.note(f"{parts[0][0].block}.{next(iter(parts[0][1]))}, gathered")
            return []
        middle = len(parts) // 2
        first = self.bisect(parts[:middle], vocabulary, beside)
        return first + self.bisect(parts[middle:], vocabulary, [*beside, *first])

    def note(self, what: str) -> None:
        self.tried.append(f"{what} ({self.trials.last})")

    def check_tokens(self, chosen: list[Choice], vocabulary: bool) -> None:
        """Decode past any window; where tokens differ, attention is cut no more but its layers gathered."""
        inputs = self.trials.prompt()
        if inputs is None:
            return
        if self.trials.same_tokens(chosen, vocabulary, *inputs):
            return
        self.note("decoding with attention cut by heads")
        less = [(p, rules) for p, rules in chosen if p.kind != "attention"]
        less += [(s, s.variants[0]) for p, _ in chosen if p.kind == "attention" for s in p.one_by_one()]
        if not (self.trials.hold(less, vocabulary) and self.trials.same_tokens(less, vocabulary, *inputs)):
            self.note("decoding with everything gathered")
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: cut on {self.trials.world_size} ranks, its twin generates other tokens;"
                f" tried {'; '.join(self.tried)}"
            )
        chosen[:] = less


def _likeliest(proposals: Sequence[Proposal]) -> list[Choice]:
    found: list[Choice] = []
    for proposal in proposals:
        found += [(p, p.variants[0]) for p in ([proposal] if proposal.variants else proposal.one_by_one())]
    return found


def _beneath(proposal: Proposal, model: nn.Module, covered: set[str]) -> bool:
    """Whether a proposal's block is one that a written policy describes."""
    if not covered:
        return False
    named = [name for name, module in model.named_modules() if type(module).__name__ == proposal.block]
    return any(name == path or name.startswith(path + ".") for name in named for path in covered if path)
