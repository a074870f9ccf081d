"""Two stages of one thread each: decode of four requests in flight against one, and against one worker with the whole
model; the shape of SmolLM2-135M with random weights, in turns.

python -m benchmarks.pipeline [--rounds 3] [--json OUT]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import measure
from benchmarks.batching import calls, tokens_per_second, whole
from parallelformers_ng import parallelize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    workers = {"device": "cpu"}
    staged = parallelize(
        whole(torch.float32), 2, workers=workers, fit={"strategy": "pipeline"}, batching=True, progress=False
    )
    single = parallelize(whole(torch.float32), 1, workers=workers, batching=True, progress=False)
    asked = calls([(16, 64)] * 4)
    for made in (staged, single):
        tokens_per_second(made, asked, 4)  # from when on they share
    contest = {
        "two stages, one request": lambda: tokens_per_second(staged, asked[:1], 1),
        "two stages, four in flight": lambda: tokens_per_second(staged, asked, 4),
        "one worker, one request": lambda: tokens_per_second(single, asked[:1], 1),
        "one worker, four in flight": lambda: tokens_per_second(single, asked, 4),
    }
    found = measure.interleave(contest, options.rounds)
    measure.report("decode in stages", "tokens/s", found, against=next(iter(contest)), higher_is_better=True)
    measure.save(options.json, "pipeline", found)


if __name__ == "__main__":
    main()
