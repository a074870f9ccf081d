"""Prints a ShardPlan as a table."""

from __future__ import annotations

import re

from parallelformers_ng.sharding.plan import ShardPlan, TensorPlan, human_bytes


def render(plan: ShardPlan) -> str:
    """One line per kind of tensor; layers that differ only in their number share a line."""
    rows: dict[tuple[str, ...], list[TensorPlan]] = {}
    for tensor in plan.stored():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name)
        rows.setdefault((pattern, str(tensor.shape), tensor.rule), []).append(tensor)
    lines = [("tensor", "count", "whole", "rule", "each rank")]
    for (pattern, shape, rule), tensors in rows.items():
        shapes = [list(shard.shape(tensors[0].shape)) for shard in tensors[0].shards]
        ranks = "whole" if tensors[0].is_replicated else " ".join(str(shape) for shape in shapes)
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
    head = (
        f"{plan.model_class} on {plan.world_size} ranks, policy {plan.policy} ({plan.source})\n"
        f"whole: {human_bytes(plan.bytes_whole)}  {per_rank}\n"
        f"cut: {plan.cut_share:.1%} of the cuttable bytes, {1 - plan.whole_share:.1%} of all"
        f"  replicated: {human_bytes(whole_everywhere)}\n" + (f"warning: {plan.warning}\n" if plan.warning else "")
    )
    return head + "\n".join(body)
