"""Judges the model types that it reads from standard input, one per line, and prints one line of JSON for each type.

With `full`, the program plans default configurations instead; with `shares`, it checks whether calls share a batch. The
program runs in a separate process, so that a crash or a hang costs only one model type.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings

import torch
import transformers

from tests.zoo.full_size import measure
from tests.zoo.judge import judge
from tests.zoo.sharing import shares


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of modelling code goes to standard error
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    world_sizes = tuple(int(size) for size in sys.argv[1].split(","))
    modes = sys.argv[2:]
    for line in sys.stdin:
        try:
            name = line.strip()
            if "shares" in modes:
                verdicts = shares(name)
            elif "full" in modes:
                verdicts = [measure(name, world_sizes)]
            else:
                verdicts = judge(name, world_sizes, "varied" in modes)
        except Exception:  # the parent reports the missing verdict
            traceback.print_exc()
            verdicts = []
        print(json.dumps(verdicts), file=answers, flush=True)


if __name__ == "__main__":
    main()
