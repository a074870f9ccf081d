"""Formats names, sizes and plans of tensors for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from parallelformers_ng.sharding.tensor_plan import TensorPlan


def pattern_of(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def human_bytes(count: float) -> str:
    """Return bytes as a short text in decimal units, as disks and Parallelformers' tables count: `2.72 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def tensor_table(plans: Iterable[TensorPlan]) -> str:
    """Return a table with one line for each kind of tensor; layers that differ only in their number share a line."""
    rows: dict[tuple[str, ...], list[TensorPlan]] = {}
    for tensor in plans:
        rows.setdefault((pattern_of(tensor.name), str(tensor.shape), tensor.rule), []).append(tensor)
    lines = [("tensor", "count", "whole", "rule", "each rank")]
    for (pattern, shape, rule), tensors in rows.items():
        shapes = [list(shard.shape(tensors[0].shape)) for shard in tensors[0].shards]
        rank_shapes = (str(shape) if math.prod(shape) else "–" for shape in shapes)
        ranks = "whole" if tensors[0].is_replicated else " ".join(rank_shapes)
        lines.append(
            (pattern, str(len(tensors)), shape.replace("(", "[").replace(",)", "]").replace(")", "]"), rule, ranks)
        )
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    body = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) + "  " + line[4]
        for line in lines
    ]
    body.insert(1, "-" * max(len(line) for line in body))
    return "\n".join(body)
