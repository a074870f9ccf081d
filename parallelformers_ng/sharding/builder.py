"""Builds a `ShardPlan` from policies, a model and a world size. No weights are read: a model on `meta` is enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter, truediv

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from parallelformers_ng.errors import PolicyError, did_you_mean
from parallelformers_ng.live_code.stock import foreign_modules, names_of
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.sharding.casting import CastRule
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.heads import Heads
from parallelformers_ng.sharding.leftovers import cut_leftovers
from parallelformers_ng.sharding.partition import HeadShare, even_out, fill_waits, share_heads
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Policy, Selection, is_block
from parallelformers_ng.sharding.quantizing import border, choose_encodings
from parallelformers_ng.sharding.tensor_plan import WHOLE, TensorPlan, plans_of_tensors
from parallelformers_ng.sharding.tensors import dotted, is_within
from parallelformers_ng.sharding.units import CutUnit, attention_of, units_of
from parallelformers_ng.sharding.vocabulary import cut_rows, find_vocabulary

# A tensor counts as evenly spread if the rank with the most bytes has at most 1.05 times those of the rank with the
# fewest. Each rank's bytes are first divided by its fraction of the model.
_MAX_IMBALANCE = 1.05


def build_plan(
    model: nn.Module,
    world_size: int,
    selection: Selection,
    dtype: torch.dtype | None = None,
    exhaustive: bool = False,
    parts: Sequence[float] = (),
    quantize: QuantizeOptions | None = None,
    ahead: int = 0,
) -> ShardPlan:
    """Apply the policies of a selection to a model on any device, also `meta`.

    `exhaustive` also cuts small tensors that policies leave whole, so that a proof tests every cut. `parts` has each
    rank's fraction of the model. `ahead` is the number of bytes of weights that a rank can prefetch while it waits.
    """
    group = border(model, quantize)
    foreign = {} if selection.proven else foreign_modules(model)

    def build(shares: Sequence[float], row_shares: Sequence[float]) -> ShardPlan:
        draft = Draft(model, world_size, parts, shares, row_shares, group, foreign)
        builder = _Builder(draft, selection.customs, lenient=not exhaustive)
        builder.find_whole_attentions(selection.policies)
        for policy in selection.policies:
            builder.apply(policy)
        if selection.vocabulary:
            builder.cut_vocabulary()
        if selection.leftovers:
            cut_leftovers(builder.draft, exhaustive)
        return builder.finish(selection, dtype, quantize)

    def fullest(shard_plan: ShardPlan) -> float:
        return max(map(truediv, shard_plan.bytes_per_rank, parts or [1.0] * world_size))

    plain = build(parts, parts)
    flexible, others = _spread_tensors(plain, parts)
    if shares := even_out(plain.bytes_per_rank, sum(tensor.bytes_whole for tensor in flexible), parts):
        return min(plain, build(shares, shares), key=fullest)
    if not ahead or parts:
        return plain
    rows = {f"{path}.weight" for path in find_vocabulary(model)}
    columns = sum(tensor.bytes_whole for tensor in flexible if tensor.name not in rows)
    loads = [sum(tensor.bytes_on(rank) for tensor in others) for rank in range(world_size)]
    shares = fill_waits(loads, columns, ahead)
    return build(shares, ()) if shares else plain


def _spread_tensors(plan: ShardPlan, parts: Sequence[float]) -> tuple[list[TensorPlan], list[TensorPlan]]:
    """Return the sharded tensors whose bytes on each rank follow `parts`, and all other sharded tensors.

    A tensor that is cut by whole heads often does not follow `parts`.
    """
    spread: tuple[list[TensorPlan], list[TensorPlan]] = [], []
    for tensor in plan.stored():
        if not tensor.is_replicated:
            loads = [tensor.bytes_on(rank) / part for rank, part in enumerate(parts or [1.0] * plan.world_size)]
            spread[max(loads) > _MAX_IMBALANCE * min(loads)].append(tensor)
    return spread


def misfit(model: nn.Module, policy: type[Policy], world_size: int, customs: Sequence[type[Policy]] = ()) -> str:
    """Return why a policy does not fit a model on `world_size` ranks; "" if it fits.

    The check ignores foreign code, and blocks to which `customs`, the caller's policies, apply.
    """
    try:
        _Builder(Draft(model, world_size), customs).apply(policy)
    except PolicyError as error:
        return str(error)
    return ""


class _Builder:
    def __init__(self, draft: Draft, customs: Sequence[type[Policy]] = (), lenient: bool = False) -> None:
        self.customs = customs
        self.lenient = lenient
        # module path → why the layers in the module stay whole although a policy has rules for them
        self.uncut: dict[str, str] = {}
        # path of the smallest module around a unit of rules → paths of modules in it that belong to other units
        self.units: dict[str, tuple[str, ...]] = {}
        self.whole_attentions: dict[type[Policy], str] = {}  # policy → why all attentions of the policy stay whole
        self.draft = draft
        self.blocks: list[str] = []  # paths of the modules to which policies were applied

    def find_whole_attentions(self, policies: Sequence[type[Policy]]) -> None:
        """Record in `whole_attentions` the policies whose attentions may not be cut, because one runs foreign code.

        Attentions of another policy that contain such an attention, or are inside one, stay whole too.
        """
        roots: dict[type[Policy], list[str]] = {}
        for policy in policies:
            for block, _ in () if policy in self.customs else self._blocks(policy):
                rules = [path for path, rule in policy.plan.items() if isinstance(rule, Heads)]
                heads = [path for path in rules if dotted(block, path) in self.draft.modules]
                for unit in units_of(policy, heads):
                    if unit.is_attention:
                        roots.setdefault(policy, []).append(dotted(block, unit.root))
                        if reason := self._not_stock(unit, block):
                            self.whole_attentions.setdefault(policy, reason)
        for policy, reason in [*self.whole_attentions.items()]:
            for other, places in roots.items():
                nested = (is_within(a, b) or is_within(b, a) for a in roots[policy] for b in places)
                if other not in self.whole_attentions and any(nested):
                    self.whole_attentions[other] = reason

    def _blocks(self, policy: type[Policy]) -> list[tuple[str, nn.Module]]:
        return [
            (path, module)
            for path, module in self.draft.modules.items()
            if is_block(module, policy) and (policy in self.customs or not self._is_of_custom(module))
        ]

    def _is_of_custom(self, module: nn.Module) -> bool:
        return any(is_block(module, custom) for custom in self.customs)

    def _not_stock(self, unit: CutUnit, block: str) -> str:
        layers = [target for path in unit.paths for target in self._targets(dotted(block, path))]
        return unit.not_stock(self.draft, block, layers)

    def apply(self, policy: type[Policy]) -> None:
        blocks = self._blocks(policy)
        self.blocks += [path for path, _ in blocks]
        unmatched = set(policy.plan)
        for path, block in blocks:
            self._check_requirements(policy, path, block)
            try:
                heads = self._head_shares(policy, path)
            except PolicyError as error:
                if not (policy.inferred and self.lenient):
                    raise PolicyError(f"{policy.__name__}: {error}") from error
                self.uncut[path] = str(error)
                unmatched.clear()
                continue
            for unit in units_of(policy, heads):
                unmatched -= self._apply_unit(policy, unit, path, heads)
        if policy not in self.customs:  # a rule may match only in blocks to which the caller's policies apply
            for path, block in self.draft.modules.items():
                if is_block(block, policy) and self._is_of_custom(block):
                    unmatched -= self._matching(policy, path, unmatched)
        for rule_path in sorted(unmatched):
            if not any(is_within(rule_path, path) for path in policy.optional):
                raise PolicyError(_no_match(policy, rule_path, blocks))

    def _apply_unit(
        self, policy: type[Policy], unit: CutUnit, block: str, heads: dict[str, list[HeadShare]]
    ) -> set[str]:
        targets = {path: self._targets(dotted(block, path)) for path in unit.paths}
        if policy not in self.customs:
            reason = self.whole_attentions.get(policy, "") if unit.is_attention else ""
            if reason := self._not_stock(unit, block) or reason:
                self.uncut[dotted(block, unit.root)] = reason
                return self._matching(policy, block, targets)
        before = dict(self.draft.cuts), dict(self.draft.layers)
        matched: set[str] = set()
        try:
            for rule_path, layers in targets.items():
                rule = policy.plan[rule_path]
                above = attention_of(rule_path, rule, heads)
                self.draft.rule = f"{policy.__name__}: rule {rule_path!r}"
                self.draft.counter = self.draft.modules.get(dotted(block, above))
                self.draft.heads = heads.get(above, [])
                for target in layers:
                    if rule.finds(self.draft, target):
                        rule.apply(self.draft, target)
                        matched.add(rule_path)
        except PolicyError as error:
            reason = f"rule {rule_path!r} on {target}: {error}"
            if not (policy.inferred and self.lenient):
                raise PolicyError(f"{policy.__name__}: {reason}") from error
            self.draft.cuts, self.draft.layers = before
            self.uncut[dotted(block, unit.root)] = reason
        if matched:
            self.units[dotted(block, unit.root)] = tuple(dotted(block, other) for other in unit.others)
        return matched

    def _matching(self, policy: type[Policy], block: str, rules: Iterable[str]) -> set[str]:
        return {
            path
            for path in rules
            for target in self._targets(dotted(block, path))
            if target in self.draft.modules or policy.plan[path].finds(self.draft, target)
        }

    def _targets(self, path: str) -> list[str]:
        """Return the paths of the modules that match a rule's path; a `*` matches one name between dots."""
        if "*" not in path:
            return [path]
        pattern = re.compile(re.escape(path).replace(r"\*", "[^.]+"))
        return [name for name in self.draft.modules if pattern.fullmatch(name)]

    def _check_requirements(self, policy: type[Policy], path: str, block: nn.Module) -> None:
        for name, wanted in policy.requires.items():
            try:
                value = attrgetter(name)(block)
            except AttributeError as error:
                where = f"{type(block).__name__} has no attribute {name!r}"
                raise PolicyError(f"{policy.__name__}: requires {name!r}, and {where} ({error})") from error
            if value != wanted:
                raise PolicyError(
                    f"{policy.__name__}: {dotted(path, name)} is {value!r}, and this policy requires {wanted!r}"
                )

    def _head_shares(self, policy: type[Policy], path: str) -> dict[str, list[HeadShare]]:
        shares = {}
        for rule_path, rule in policy.plan.items():
            if not isinstance(rule, Heads) or (module := self.draft.modules.get(dotted(path, rule_path))) is None:
                continue
            try:
                counts = rule.count(self.draft, module)
                shares[rule_path] = share_heads(*counts, self.draft.world_size, self.draft.parts)
            except PolicyError as error:
                raise PolicyError(f"rule {rule_path!r} on {dotted(path, rule_path)}: {error}") from error
        return shares

    def cut_vocabulary(self) -> None:
        """Cut input embeddings and output heads by rows of the vocabulary, tied or not."""
        readers = [path for path in self.draft.foreign if "weight" in names_of(self.draft.modules[path])]
        cut_by_policies = set(self.draft.cuts)
        self.draft.rule = "vocabulary"
        for path, cls in find_vocabulary(self.draft.model).items():
            if not cut_by_policies.isdisjoint((f"{path}.weight", f"{path}.bias")):
                continue
            if reader := next((other for other in readers if is_within(path, other)), None):
                self.uncut[path] = f"{reader or 'the model'}: {self.draft.foreign[reader]}"
                continue
            cut_rows(self.draft, path, cls)

    def finish(self, selection: Selection, dtype: torch.dtype | None, quantize: QuantizeOptions | None) -> ShardPlan:
        keep_whole = (WHOLE,) * self.draft.world_size, ""
        casts = CastRule(self.draft.model, dtype)
        tensors = plans_of_tensors(self.draft.model, lambda name: self.draft.cuts.get(name, keep_whole), casts.dtype_of)
        cuttable = {
            dotted(path, name)
            for path, module in self.draft.modules.items()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.ndim >= 2 and not isinstance(module, _ConvNd)
        }
        quantized, misfits = choose_encodings(self.draft.model, quantize, tensors, self.blocks)
        return ShardPlan(
            model_class=type(self.draft.model).__name__,
            world_size=self.draft.world_size,
            tensors=tensors,
            layers=list(self.draft.layers.values()),
            blocks=self.blocks,
            policy=", ".join(policy.__name__ for policy in selection.policies),
            source=selection.source,
            cuttable=frozenset(cuttable),
            settings=casts.settings(),
            quantized=quantized,
            misfits=misfits,
            uncut=self.uncut if self.draft.world_size > 1 else {},
            units=self.units,
            selection=selection,
        )


def _no_match(policy: type[Policy], rule_path: str, blocks: Sequence[tuple[str, nn.Module]]) -> str:
    names = list(dict.fromkeys(name for _, block in blocks for name, _ in block.named_modules() if name))
    hint = did_you_mean(rule_path, names) or f" (its layers: {', '.join(names[:12])})"
    return f"{policy.__name__}: rule {rule_path!r} matches no layer of {'/'.join(policy.blocks())}{hint}"
