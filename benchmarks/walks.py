"""Random walks over public calls, changes, hooks and moves: whole beside parallelized (see tests/walks.py).

python -m benchmarks.walks --walks 40 --steps 50
"""

from __future__ import annotations

import argparse
import sys
import traceback

from tqdm import tqdm

from parallelformers_ng import parallelize, start_group
from tests.walks import MODELS, Walk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first walk")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    taken = refused = failed = 0
    names = list(MODELS)
    for seed in tqdm(range(args.first, args.first + args.walks), desc="walks", disable=not sys.stderr.isatty()):
        name = names[seed % len(names)]
        make, inputs = MODELS[name]
        with start_group(args.ranks, device="cpu") as group:
            walk = Walk(make(), parallelize(make(), workers=group), inputs(), seed)
            try:
                walk.run(args.steps)
            except Exception:
                failed += 1
                print(f"walk {seed} ({name}) failed after: {'; '.join(walk.steps[-6:])}")
                traceback.print_exc()
        taken += len(walk.steps)
        refused += walk.refused
    print(
        f"{args.walks} walks, {taken} steps: {taken - refused} equal, {refused} refused in words, {failed} walks failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
