"""Measures batched decoding on two CPU ranks, with a random model of SmolLM2-135M's shape; contestants take turns.

python -m benchmarks.batching [--rounds 3] [--dtype float32] [--only "16 mixed"] [--json OUT]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from benchmarks.decode import SHAPES
from parallelformers_ng import parallelize
from parallelformers_ng.model.groups import RUNNER
from parallelformers_ng.runtime.group import WorkerGroup

SHAPE = SHAPES["135M"]
THREADS = 2  # threads of the peer, which has one process: as many as ranks


def whole(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).to(dtype).eval()


def model(dtype: torch.dtype, batching: Any) -> Any:
    return parallelize(whole(dtype), 2, workers={"device": "cpu"}, batching=batching, progress=False)


def calls(lengths: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return arguments of greedy calls. `lengths` has pairs: tokens of the prompt, tokens to generate."""
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


def tokens_per_second(model: Any, calls: list[dict[str, Any]], threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        seconds = measure.seconds(lambda: list(pool.map(lambda call: model.generate(**call), calls)))
    return sum(call["max_new_tokens"] for call in calls) / seconds


def prompts(model: Any, base: int, count: int) -> float:
    """Return calls per second. A call generates one token after a prompt of `base` tokens that all calls share and 16
    tokens of its own."""
    common = torch.randint(5, SHAPE["vocab_size"], (1, base))
    ids = [torch.cat((common, torch.randint(5, SHAPE["vocab_size"], (1, 16))), -1) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        ask = lambda each: model.generate(each, max_new_tokens=1, do_sample=False)  # noqa: E731
        return count / measure.seconds(lambda: list(pool.map(ask, ids)))


def of_transformers(model: Any, requests: list[dict[str, Any]]) -> float:
    """Return tokens per second of transformers' own continuous batching, in this process."""
    torch.set_num_threads(THREADS)
    ids = [call["input_ids"][0].tolist() for call in requests]

    def run() -> None:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
        with model.continuous_batching_context_manager(generation_config=config) as manager:
            for each, call in zip(ids, requests, strict=True):
                manager.add_request(each, max_new_tokens=call["max_new_tokens"])
            done = 0
            while done < len(requests):
                result = manager.get_result(timeout=60)
                done += result is not None and result.is_finished()

    try:
        return sum(call["max_new_tokens"] for call in requests) / measure.seconds(run)
    finally:
        torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only", default="", help="run only contests whose names contain this text")
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
    sampled = [{**call, "do_sample": True, "top_k": 50, "top_p": 0.95, "seed": n} for n, call in enumerate(full)]
    dtype = getattr(torch, options.dtype)

    @cache
    def model_for(variant: str) -> Any:
        """Return a model after concurrent warm-up calls; the first contest that uses the variant makes it."""
        if variant == "whole":
            return whole(dtype)
        if variant == "one replica":
            sharded = parallelize(whole(dtype), workers=WorkerGroup(1, target=RUNNER, threads=1), progress=False)
        elif variant == "two replicas":
            sharded = parallelize(whole(dtype), 1, workers={"device": "cpu", "replicas": 2}, progress=False)
        else:
            sharded = model(dtype, {"together": True, "apart": False, "forgetful": {"prefix_tokens": 0}}[variant])
        tokens_per_second(sharded, full[:4], 4)
        return sharded

    contests = {
        "16 mixed calls, replicas of one rank with one thread": {
            "one": lambda: tokens_per_second(model_for("one replica"), mixed, 16),
            "two": lambda: tokens_per_second(model_for("two replicas"), mixed, 16),
        },
        "16 mixed calls": {
            "one after another": lambda: tokens_per_second(model_for("apart"), mixed, 16),
            "together": lambda: tokens_per_second(model_for("together"), mixed, 16),
        },
        "16 mixed calls beside transformers": {
            "generate_batch of transformers": lambda: of_transformers(model_for("whole"), mixed),
            "together": lambda: tokens_per_second(model_for("together"), mixed, 16),
        },
        "decode": {
            "one row": lambda: tokens_per_second(model_for("apart"), full[:1], 1),
            "8 rows": lambda: tokens_per_second(model_for("together"), full[:8], 8),
            "16 rows": lambda: tokens_per_second(model_for("together"), full, 16),
        },
        "decode, sampled with top-k and top-p": {
            "16 greedy rows": lambda: tokens_per_second(model_for("together"), full, 16),
            "16 sampled rows": lambda: tokens_per_second(model_for("together"), sampled, 16),
        },
        "first tokens of 16 prompts that share 256 tokens": {
            "each runs its own": lambda: prompts(model_for("forgetful"), 256, 16),
            "what they share runs once": lambda: prompts(model_for("together"), 256, 16),
        },
        "a lone call": {
            "batching off": lambda: tokens_per_second(model_for("apart"), lone, 1),
            "batching on": lambda: tokens_per_second(model_for("together"), lone, 1),
        },
    }
    figures = {}
    for what, contestants in contests.items():
        if options.only in what:
            for run in contestants.values():
                run()  # warm up
            figures[what] = measure.interleave(contestants, options.rounds)
            unit = "calls/s" if "first" in what else "tokens/s"
            measure.report(what, unit, figures[what], against=next(iter(contestants)), higher_is_better=True)
    measure.save(options.json, f"batching {options.dtype}", figures)


if __name__ == "__main__":
    main()
