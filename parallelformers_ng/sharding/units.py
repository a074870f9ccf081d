"""Groups the rules that must be applied together into units, and finds modules that see only a part of a result.

    hidden ─► [q k v] ─► heads ─► [o] ─► hidden ─► [gate up] ─► columns ─► [down] ─► hidden
              └──── one unit ────┘                 └─────── another unit ──────┘

Between units every rank has the whole result. A unit can therefore stay whole while other units are cut. But an
attention may use the position bias, keys or values of another attention. Therefore all attentions of a policy are cut,
or no attention of the policy is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from parallelformers_ng.live_code.stock import foreign_layer, names_of
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Policy, Rule
from parallelformers_ng.sharding.tensors import dotted, is_within


@dataclass(frozen=True)
class CutUnit:
    """Rules that are applied together or not at all."""

    paths: tuple[str, ...]  # paths of the rules beneath the block, in the policy's order
    root: str  # path, beneath the block, of the smallest module that contains all layers of the rules
    others: tuple[str, ...] = ()  # paths of modules whose rules belong to other units
    is_attention: bool = False  # whether the unit's layers are cut by whole heads

    def not_stock(self, draft: Draft, block: str, layers: Iterable[str]) -> str:
        """Return why the unit may not be cut: a module in it runs foreign code; "" if none does.

        Layers are checked even if a proof has run their code: a partial sum may exceed a bound that the twin's numbers
        never reach.
        """
        root = dotted(block, self.root)
        others = [dotted(block, other) for other in self.others]
        paths = [path for path in layers if path in draft.modules or draft.tensor(path) is not None]
        names = {path.rpartition(".")[2] for path in paths} | {"weight"}
        for path, reason in draft.foreign.items():
            inside = is_within(path, root) and not any(is_within(path, other) for other in others)
            if inside or (is_within(root, path) and names & names_of(draft.modules[path])):
                return f"{path or 'the model'}: {reason}"
        inner = (path for path in paths if path in draft.modules and draft.modules[path]._parameters)
        reasons = ((path, foreign_layer(draft.modules[path])) for path in inner)
        return next((f"{path}: {reason}" for path, reason in reasons if reason), "")


def sees_part(plan: ShardPlan, path: str) -> bool:
    return any(
        root in plan.units and not any(is_within(path, other) for other in plan.units[root]) for root in and_above(path)
    )


def and_above(path: str) -> Iterator[str]:
    """Yield a path, then the paths of all modules that contain the module at `path`, up to "" for the model."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def units_of(policy: type[Policy], heads: Collection[str]) -> list[CutUnit]:
    """Split the rules of a policy into units: one unit for each attention, and one unit for all other rules."""
    groups: dict[str, list[str]] = {}
    for path, rule in policy.plan.items():
        groups.setdefault(attention_of(path, rule, heads), []).append(path)
    roots = {key: _common_root(paths) for key, paths in groups.items()}
    units = []
    for key, paths in groups.items():
        others = tuple(root for root in roots.values() if root and root != roots[key])
        units.append(CutUnit(tuple(paths), roots[key], others, key in heads))
    return units


def attention_of(path: str, rule: Rule, heads: Iterable[str]) -> str:
    """Return the path of the `Heads` rule for a rule's layer: the one it names, or the nearest at or above `path`; "?"
    if there is none."""
    named: str | None = getattr(rule, "heads", None)
    if named is not None:
        return named
    return max((head for head in heads if is_within(path, head)), key=len, default="?")


def _common_root(paths: Sequence[str]) -> str:
    parents = [p if any(is_within(o, p) for o in paths if o != p) else p.rpartition(".")[0] for p in paths]
    split = [path.split(".") if path else [] for path in parents]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1 or "*" in parts[0]:
            break
        common.append(parts[0])
    return ".".join(common)
