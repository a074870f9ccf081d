"""What decoding calls together brings: two CPU ranks, the shape of SmolLM2-135M with random weights, in turns.

python -m benchmarks.batching [--rounds 3] [--dtype float32] [--json OUT]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from benchmarks.decode import SHAPES
from parallelformers_ng import parallelize

SHAPE = SHAPES["135M"]


def model(dtype: torch.dtype, batching: bool) -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).to(dtype).eval()
    return parallelize(made, 2, workers={"device": "cpu"}, batching=batching, progress=False)


def calls(lengths: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Greedy calls of so many tokens before and after."""
    numbers = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(5, SHAPE["vocab_size"], (1, before), generator=numbers),
            "max_new_tokens": after,
            "min_new_tokens": after,
            "do_sample": False,
        }
        for before, after in lengths
    ]


def tokens_per_second(made: Any, asked: list[dict[str, Any]], threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        taken = measure.seconds(lambda: list(pool.map(lambda call: made.generate(**call), asked)))
    return sum(call["max_new_tokens"] for call in asked) / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    numbers = torch.Generator().manual_seed(3)
    mixed = calls(
        [
            (int(torch.randint(8, 129, (), generator=numbers)), int(torch.randint(8, 65, (), generator=numbers)))
            for _ in range(16)
        ]
    )
    full, lone = calls([(16, 96)] * 16), calls([(32, 64)])
    dtype = getattr(torch, options.dtype)
    together, apart = model(dtype, batching=True), model(dtype, batching=False)
    for made in (together, apart):
        made.generate(**lone[0])
    contests = {
        "16 mixed calls": {
            "one after another": lambda: tokens_per_second(apart, mixed, 16),
            "together": lambda: tokens_per_second(together, mixed, 16),
        },
        "decode": {
            "one row": lambda: tokens_per_second(apart, full[:1], 1),
            "16 rows": lambda: tokens_per_second(together, full, 16),
        },
        "a lone call": {
            "batching off": lambda: tokens_per_second(apart, lone, 1),
            "batching on": lambda: tokens_per_second(together, lone, 1),
        },
    }
    figures = {}
    for what, contestants in contests.items():
        figures[what] = measure.interleave(contestants, options.rounds)
        measure.report(what, "tokens/s", figures[what], against=next(iter(contestants)), higher_is_better=True)
    measure.save(options.json, f"batching {options.dtype}", figures)


if __name__ == "__main__":
    main()
