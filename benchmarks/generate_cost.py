"""Measures the overhead of `generate` on workers: time in the caller compared with time in rank 0.

python -m benchmarks.generate_cost [--size 135M] [--tokens 64] [--rounds 9] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from benchmarks.decode import SHAPES
from parallelformers_ng import parallelize
from parallelformers_ng.model import replica
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.worker.call import Answer, Call
from parallelformers_ng.worker.runner import ModelRunner


class TimedRunner(ModelRunner):
    """A runner that records the seconds of its last call."""

    seconds = 0.0

    def run(self, call: Call) -> Answer:
        start = time.perf_counter()
        answer = super().run(call)
        self.seconds = time.perf_counter() - start
        return answer

    def last_seconds(self) -> float:
        return self.seconds


def main() -> None:
    """Measure round by round, and print the caller's additional time as a share of the worker's time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="135M", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each call (default: 64)")
    parser.add_argument("--rounds", type=int, default=9, help="number of measured calls (default: 9)")
    parser.add_argument("--json", help="add the figures to this file")
    arguments = parser.parse_args()
    replica.RUNNER = "benchmarks.generate_cost:TimedRunner"
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[arguments.size], pad_token_id=0, eos_token_id=None, tie_word_embeddings=True)
    model: Any = parallelize(LlamaForCausalLM(config).eval(), 2, workers={"device": "cpu"})
    group, _, _ = deployment_of(model).replicas[0].ready()
    prompt = torch.randint(3, 1000, (1, 8))

    def generate() -> object:
        return model.generate(input_ids=prompt, max_new_tokens=arguments.tokens, do_sample=False)

    generate()
    here, in_worker = [], []
    for _ in range(arguments.rounds):
        here.append(measure.seconds(generate))
        in_worker.append(group.call("last_seconds"))
    more = [a / b - 1 for a, b in zip(here, in_worker, strict=True)]
    measure.report(
        f"generate, {arguments.size}, {arguments.tokens} tokens", "s", {"the caller's": here, "in rank 0": in_worker}
    )
    print(f"  the caller waits longer by: least {min(more):.2%}, median {statistics.median(more):.2%}")
    measure.save(arguments.json, "generate_cost", {"caller": here, "rank 0": in_worker})


if __name__ == "__main__":
    main()
