"""Loads 204 damaged checkpoints with real workers. Each must raise an error that names it, or load equal weights."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.helpers.damage import DAMAGE, damaged, save_intact

ROUNDS = 12  # checkpoints for each of 17 kinds of damage
_SECONDS = 60.0  # a load that takes longer counts as a hang


def sweep(ranks: int) -> dict[str, int]:
    """Load all damaged checkpoints with one group.

    Returns:
        Counts of all checkpoints, of named errors, of bit-equal loads, of wrong results or other errors, of hangs, and
        of leaked descriptors, child processes and files.
    """
    import torch

    from parallelformers_ng import parallelize, start_group
    from parallelformers_ng.errors import CheckpointError
    from tests.zoo.families import CASES

    case = next(case for case in CASES if case.name == "llama")
    state = case.make().state_dict()
    counts = dict.fromkeys(("checkpoints", "refused by name", "bit-equal", "wrong", "hung"), 0)
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as place:
        intact = save_intact(case.make(), Path(kept))
        with start_group(ranks, device="cpu", timeout=_SECONDS) as group:
            before = _resource_counts()
            for kind in DAMAGE:
                for broken in damaged(kind, intact[kind], Path(place), ROUNDS):
                    counts["checkpoints"] += 1
                    start = time.monotonic()
                    outcome = "wrong"
                    try:
                        loaded = parallelize(broken.directory, workers=group).deparallelize().state_dict()
                        if all(torch.equal(loaded[name], state[name]) for name in state):
                            outcome = "bit-equal"
                        del loaded
                    except CheckpointError as error:
                        outcome = "refused by name" if str(broken.directory) in str(error) else "wrong"
                    except Exception as error:  # any other error is a bug of the library
                        print(f"{broken.name}: {error!r}")
                    counts[outcome] += 1
                    counts["hung"] += time.monotonic() - start > _SECONDS
            after = _resource_counts()
        counts |= {f"{name} left over": after[name] - before[name] for name in before}
        counts["files left over"] = len(list(Path(place).iterdir()))
    return counts


def _resource_counts() -> dict[str, Any]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"descriptors": len(os.listdir("/proc/self/fd")), "children": len(children)}
