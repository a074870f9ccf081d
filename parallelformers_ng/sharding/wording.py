"""Formats names, sizes and plans of tensors for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from parallelformers_ng.sharding.tensor_plan import TensorPlan


def pattern_of(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def human_bytes(count: float) -> str:
    """Return bytes as a short text in decimal units, such as "2.72 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def tensor_table(plans: Iterable[TensorPlan]) -> str:
    """Return a table with one line for each kind of tensor; layers that differ only in their number share a line."""
    rows: dict[tuple[str, tuple[int, ...], str], list[TensorPlan]] = {}
    for tensor in plans:
        rows.setdefault((pattern_of(tensor.name), tensor.shape, tensor.rule), []).append(tensor)
    lines = [("tensor", "count", "whole", "rule", "each rank")]
    for (pattern, shape, rule), tensors in rows.items():
        shapes = [shard.shape(shape) for shard in tensors[0].shards]
        rank_shapes = (str(list(own)) if math.prod(own) else "–" for own in shapes)
        ranks = "whole" if tensors[0].is_replicated else " ".join(rank_shapes)
        lines.append((pattern, str(len(tensors)), str(list(shape)), rule, ranks))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    body.insert(1, "-" * max(map(len, body)))
    return "\n".join(body)
