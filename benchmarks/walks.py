"""Runs random walks over public calls, changes, hooks and moves, and compares whole and parallelized models (see
tests/helpers/walks.py).

python -m benchmarks.walks --walks 60 --steps 50
"""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
from collections import Counter

from tqdm import tqdm

from parallelformers_ng import parallelize
from tests.helpers.walk_models import MODELS
from tests.helpers.walks import Walk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first walk")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    taken = refused = failed = 0
    names = list(MODELS)
    moves, refusals = Counter[str](), Counter[str]()
    again = functools.partial(parallelize, num_gpus=args.ranks, workers={"device": "cpu", "max_restarts": 1000})
    for seed in tqdm(range(args.first, args.first + args.walks), desc="walks", disable=not sys.stderr.isatty()):
        name = names[seed % len(names)]
        walk = Walk(name, seed, again)
        try:
            walk.run(args.steps)
        except Exception:
            failed += 1
            print(f"walk {seed} ({name}) failed after: {'; '.join(walk.steps[-6:])}", flush=True)
            traceback.print_exc()
            walk.abandon()
        else:
            print(f"walk {seed} ({name}): {len(walk.steps)} steps, {walk.refused} refused in words", flush=True)
        taken += len(walk.steps)
        refused += walk.refused
        moves += walk.taken
        refusals += walk.refusals
    print(
        f"{args.walks} walks, {taken} steps: {taken - refused} equal, {refused} refused in words, {failed} walks failed"
    )
    for move, count in sorted(moves.items()):
        print(f"{move}: {count} taken, {refusals[move]} refused")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
