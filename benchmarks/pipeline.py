"""Measures a pipeline of two stages with one thread each: four concurrent requests compared with one.

python -m benchmarks.pipeline [--rounds 3] [--tokens 64] [--json OUT]

The random model has SmolLM2-135M's shape. Two contests have requests that run apart, with as many replicas as stages;
one contest has requests that share steps. Contestants take turns.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch

from benchmarks import measure
from benchmarks.batching import calls, tokens_per_second, whole
from parallelformers_ng import parallelize


def staged(batching: bool, replicas: int = 1) -> Any:
    workers = {"device": "cpu", "replicas": replicas}
    fit = {"strategy": "pipeline"}
    return parallelize(whole(torch.float32), 2, workers=workers, fit=fit, batching=batching, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    requests = calls([(16, options.tokens)] * 4)
    prompts = calls([(128, 1)] * 4)
    figures = {}

    def contest(what: str, contestants: dict[str, tuple[Any, list[dict[str, Any]], int]]) -> None:
        """Measure contestants in turn. A contestant has a model, calls, and the number of concurrent calls."""
        for each in contestants.values():
            tokens_per_second(*each)
        runs = {name: functools.partial(tokens_per_second, *each) for name, each in contestants.items()}
        figures[what] = measure.interleave(runs, options.rounds)
        against = next(iter(contestants))
        measure.report(what, "tokens/s", figures[what], against=against, higher_is_better=True)

    with staged(batching=True) as model:
        contest(
            "decode of calls that share steps",
            {"one after another": (model, requests, 1), "four in flight": (model, requests, 4)},
        )
    with staged(batching=False, replicas=2) as model:
        contest(
            "decode of calls that run apart",
            {"one after another": (model, requests, 1), "four in flight": (model, requests, 4)},
        )
        contest(
            "prompts of 128 tokens", {"one after another": (model, prompts, 1), "four in flight": (model, prompts, 4)}
        )
    measure.save(options.json, "pipeline", figures)


if __name__ == "__main__":
    main()
