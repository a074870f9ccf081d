"""The plan as a table, for people."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelformers_ng.sharding.plan import ShardPlan, TensorPlan


def table(plan: ShardPlan) -> str:
    """The plan for people: one line per kind of tensor; layers that differ only in their number share a line."""
    rows: dict[tuple[str, ...], list[TensorPlan]] = {}
    for tensor in plan.held.stored():
        rows.setdefault((pattern_of(tensor.name), str(tensor.shape), tensor.rule), []).append(tensor)
    lines = [("tensor", "count", "whole", "rule", "each rank")]
    for (pattern, shape, rule), tensors in rows.items():
        shapes = [list(shard.shape(tensors[0].shape)) for shard in tensors[0].shards]
        held = (str(shape) if math.prod(shape) else "–" for shape in shapes)
        ranks = "whole" if tensors[0].is_replicated else " ".join(held)
        lines.append(
            (pattern, str(len(tensors)), shape.replace("(", "[").replace(",)", "]").replace(")", "]"), rule, ranks)
        )
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    body = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) + "  " + line[4]
        for line in lines
    ]
    body.insert(1, "-" * max(len(line) for line in body))
    per_rank = "  ".join(f"rank {rank}: {human_bytes(size)}" for rank, size in enumerate(plan.bytes_per_rank))
    whole_everywhere = sum(plan.replicated.values())
    kept = "".join(f"{line}\n" for line in plan.tiers.lines(plan)) if plan.tiers else ""
    kept += f"keys and values: {plan.cache}\n" if plan.cache else ""
    head = (
        f"{plan.model_class} on {plan.world_size} ranks, policy {plan.policy} ({plan.source})\n"
        f"whole: {human_bytes(plan.bytes_whole)}  {per_rank}\n"
        f"cut: {plan.cut_share:.1%} of the cuttable bytes, {1 - plan.whole_share:.1%} of all"
        f"  replicated: {human_bytes(whole_everywhere)}\n"
        + (f"strategy: {plan.strategy}, {plan.why}\n" if plan.why else "")
        + kept
        + _quantization(plan)
        + (f"warning: {plan.warning}\n" if plan.warning else "")
        + (f"{plan.why_uncut}\n" if plan.uncut else "")
    )
    return head + "\n".join(body)


def _quantization(plan: ShardPlan) -> str:
    """Lines about what is quantized, what of the cuttable is not, and why where it was to be; "" where nothing is."""
    if not plan.quantized and not plan.misfits:
        return ""
    kinds = ", ".join(sorted({encoding.kind for encoding in plan.quantized.values()})) or "quantized"
    size = sum(plan.bytes_held(tensor.name) for tensor in plan.stored() if tensor.name in plan.quantized)
    patterns: dict[str, int] = {}
    for name, count in plan.high_precision.items():
        patterns[pattern_of(name)] = patterns.get(pattern_of(name), 0) + count
    left = ", ".join(f"{pattern} ({human_bytes(count)})" for pattern, count in patterns.items())
    reasons = {pattern_of(name): why for name, why in plan.misfits.items()}
    lines = [f"{kinds}: {human_bytes(size)}  in high precision: {left or 'none'}"]
    lines += [f"not quantized: {pattern}, for {why}" for pattern, why in reasons.items()]
    return "".join(f"{line}\n" for line in lines)


def pattern_of(name: str) -> str:
    """A name that tensors share whose layers differ only in their number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def human_bytes(count: float) -> str:
    """Bytes as a short text in decimal units, as disks and Parallelformers' tables count: `2.72 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
