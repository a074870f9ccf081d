"""Advice on the ways to lay a model out: the best one and why, or what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.planner.arrangement import Arrangement
from parallelformers_ng.planner.search import Search
from parallelformers_ng.sharding.wording import human_bytes

_ANY = 1 << 16
"""More stages than models have parts."""


def advice(arrangements: Sequence[Arrangement], search: Search) -> list[str]:
    """Sentences, the best way first in `arrangements`."""
    best = arrangements[0]
    notes = _recommendation(arrangements, search) if best.memory.fits else _what_is_missing(best, search)
    return [*notes, *search.refusals]


def _recommendation(arrangements: Sequence[Arrangement], search: Search) -> list[str]:
    best = arrangements[0]
    each = best.tokens_per_second / search.sequences
    notes = [
        f"Take {best}: {best.tokens_per_second:.0f} tokens/s, {each:.0f} to a sequence. A step takes"
        f" {best.step_seconds * 1e3:.1f} ms, {best.exchange_share:.0%} of it for {best.exchanges} sums and gathers."
    ]
    others = [other for other in arrangements[1:] if other.memory.fits]
    if others:
        second = others[0]
        notes.append(f"The next best, {second}, gives {second.tokens_per_second / best.tokens_per_second:.0%} of that.")
    total = search.cluster.hosts * search.cluster.devices
    if best.devices < total:
        notes.append(
            f"{total - best.devices} of {total} devices are left over: a replica needs {best.tensor * best.pipeline},"
            f" and a sequence of its own."
        )
    memory = best.memory
    if memory.caches:
        more = math.floor((memory.room - memory.weights) / (memory.used - memory.weights) * best.batch) * best.replicas
        notes.append(f"There is room for {more} sequences of {search.length} tokens.")
    return notes


def _what_is_missing(best: Arrangement, search: Search) -> list[str]:
    """By how much it does not fit, and each thing that would help by itself."""
    memory, cluster = best.memory, search.cluster
    notes = [
        f"It does not fit: {best} needs {human_bytes(memory.used)} on a device that has room for"
        f" {human_bytes(memory.room)}, {human_bytes(memory.used - memory.room)} too much. It would fit"
    ]
    pipeline, wider, _ = search.laid_out(best.tensor, _ANY)
    if wider.fits:
        devices = best.tensor * pipeline
        hosts = math.ceil(devices / cluster.devices)
        notes.append(f"- on {devices} devices, which is {hosts} such hosts: {best.tensor} × {pipeline} × 1;")
    sequences = math.floor((memory.room - memory.weights) / (memory.used - memory.weights) * best.batch) * best.replicas
    if sequences > 0:
        notes.append(f"- with {sequences} sequences at a time in the place of {search.sequences};")
    if search.quantize is None:
        less = search.with_weights_in(QuantizeOptions("int8"), best)
        if less.fits:
            notes.append(f"- with quantize='int8', which leaves {human_bytes(less.weights)} of weights on a device;")
    if len(notes) == 1:
        notes.append("- on devices with more memory.")
    notes[-1] = notes[-1].rstrip(";.") + "."
    return notes
