"""Groups the rules of a policy that belong together, and finds the modules that see one rank's part of a result.

    hidden ─► [q k v] ─► heads ─► [o] ─► hidden ─► [gate up] ─► columns ─► [down] ─► hidden
              └──── one unit ────┘                 └─────── another unit ──────┘

Between units every rank has the whole result. So a unit can be left uncut, whatever becomes of the others. But an
attention may use what another has made of its heads, a position bias or keys and values: those of a policy are cut
together or not at all.
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
    """Rules that are applied together or not at all.

    Attributes:
        paths: their paths beneath the block, in the policy's order.
        root: path beneath the block of the smallest module that holds all of them.
        others: roots of other units that lie beneath it.
        is_attention: whether it is counted in heads.
    """

    paths: tuple[str, ...]
    root: str
    others: tuple[str, ...] = ()
    is_attention: bool = False

    def not_stock(self, draft: Draft, block: str, layers: Iterable[str]) -> str:
        """Return name a module that sees parts and runs code of the program's, with that code; "" if there is none.

        Args:
            block: dotted path of the block in the model.
            layers: dotted paths of the layers that the rules name. They are asked about even if a proof has run their
                code: a rank's part of a sum may pass a bound that no number of a small copy comes near.
        """
        root = dotted(block, self.root)
        others = [dotted(block, other) for other in self.others]
        names = {path.rpartition(".")[2] for path in self.paths} | {"weight"}
        for path, reason in draft.foreign.items():
            inside = is_within(path, root) and not any(is_within(path, other) for other in others)
            if inside or (is_within(root, path) and names & names_of(draft.modules[path])):
                return f"{path or 'the model'}: {reason}"
        inner = (path for path in layers if path in draft.modules and draft.modules[path]._parameters)
        reasons = ((path, foreign_layer(draft.modules[path])) for path in inner)
        return next((f"{path}: {reason}" for path, reason in reasons if reason), "")


def sees_part(plan: ShardPlan, path: str) -> bool:
    """Return whether a module of a cut model computes on one rank's part of a result."""
    return any(
        root in plan.units and not any(is_within(path, other) for other in plan.units[root]) for root in and_above(path)
    )


def and_above(path: str) -> Iterator[str]:
    """Yield a path, and those of the modules that hold the one there, up to the model."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def units_of(policy: type[Policy], heads: Collection[str]) -> list[CutUnit]:
    """Split the rules of a policy into units: the rules of each attention, and all others.

    Args:
        heads: paths of the rules `Heads` that apply to the block.
    """
    groups: dict[str, list[str]] = {}
    for path, rule in policy.plan.items():
        groups.setdefault(_attention_of(path, rule, [*heads]), []).append(path)
    roots = {key: _common_root(paths) for key, paths in groups.items()}
    return [
        CutUnit(
            tuple(paths),
            roots[key],
            tuple(r for k, r in roots.items() if k != key and r and r != roots[key]),
            key in heads,
        )
        for key, paths in groups.items()
    ]


def _attention_of(path: str, rule: Rule, heads: Sequence[str]) -> str:
    """Return the attention that a rule belongs to, "?" for none."""
    named: str | None = getattr(rule, "heads", None)
    if named is not None:
        return named
    return max((head for head in heads if is_within(path, head)), key=len, default="?")


def _common_root(paths: Sequence[str]) -> str:
    """Return the path of the smallest module that holds all layers of these paths, and calls them."""
    parents = [p if any(is_within(o, p) for o in paths if o != p) else p.rpartition(".")[0] for p in paths]
    split = [path.split(".") if path else [] for path in parents]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1 or "*" in parts[0]:
            break
        common.append(parts[0])
    return ".".join(common)
