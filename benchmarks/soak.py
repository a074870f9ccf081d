"""Runs long versions of three tests: many threads, many caches, and a decode loop in the caller.

python -m benchmarks.soak [--threads 32] [--calls 100] [--cache-calls 1000] [--json OUT]
"""

from __future__ import annotations

import argparse
import functools
import random
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from benchmarks.decode import SHAPES
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of

DEMO_MODEL = Path(__file__).parent.parent / "examples" / "demo_model"


def build() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, pad_token_id=0, eos_token_id=None, bos_token_id=1,
    )  # fmt: skip
    return parallelize(LlamaForCausalLM(config).eval(), 2, workers={"device": "cpu"})


def threads(model: Any, count: int, calls: int) -> int:
    """Return the number of answers that differ from a solo run. `count` threads make `calls` mixed greedy and seeded
    calls each."""

    def ask(number: int) -> torch.Tensor:
        options = {"do_sample": True, "seed": number} if number % 2 else {"do_sample": False}
        return model.generate(input_ids=torch.tensor([[5, 9, 3 + number % 120]]), max_new_tokens=4, **options)

    alone = [ask(number) for number in range(calls)]
    wrong = [0] * count

    def run(thread: int) -> None:
        order = random.Random(thread).sample(range(calls), calls)
        wrong[thread] = sum(not torch.equal(ask(number), alone[number]) for number in order)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(wrong)


def caches(model: Any, calls: int) -> list[int]:
    """Return the bytes by which each worker grows over `calls` forward passes whose caches are kept and dropped at
    random. The first tenth of the passes does not count."""
    draw, kept = random.Random(0), []
    pids = deployment_of(model).pids
    before: list[int] = []
    for number in range(calls):
        kept.append(model(input_ids=torch.randint(3, 131, (1, 16))).past_key_values)
        while len(kept) > 20 or (kept and draw.random() < 0.5):
            kept.pop(draw.randrange(len(kept)))
        if number == calls // 10:
            before = [psutil.Process(pid).memory_full_info().pss for pid in pids]
    return [psutil.Process(pid).memory_full_info().pss - old for pid, old in zip(pids, before, strict=True)]


def by_hand(model: Any, tokens: int = 64) -> list[int]:
    """Return the tokens of a greedy loop in the caller, with a cache handle and one request for each token."""
    ids, cache, chosen = torch.tensor([[5, 9, 77, 31]]), None, []
    for _ in range(tokens):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        chosen.append(int(ids))
    return chosen


def loops(model: Any, tokens: int = 64) -> dict[str, list[float]]:
    """Return the seconds that `generate` and the loop in the caller take for the same tokens, in turns."""

    def generate() -> list[int]:
        prompt = torch.tensor([[5, 9, 77, 31]])
        whole = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return whole[0, 4:].tolist()

    by_hand(model)  # warm up
    if generate() != by_hand(model, tokens):
        raise SystemExit("the loop by hand chose other tokens than generate")
    ways = {"generate": generate, "a loop by hand": lambda: by_hand(model, tokens)}
    return measure.interleave({name: functools.partial(measure.seconds, way) for name, way in ways.items()}, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--cache-calls", type=int, default=1000)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    demo = parallelize(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), 2, workers={"device": "cpu"})
    real = loops(demo)
    measure.report("64 tokens of the demo's model (4 layers of 192)", "s", real, against="generate")
    demo.deparallelize()
    config = LlamaConfig(**SHAPES["135M"], eos_token_id=None, pad_token_id=0, tie_word_embeddings=True)
    usual = parallelize(LlamaForCausalLM(config).eval(), 2, workers={"device": "cpu"})
    small = loops(usual, 16)
    measure.report("16 tokens of a model of 135M parameters", "s", small, against="generate")
    usual.deparallelize()
    del usual, demo
    model = build()
    tiny = loops(model)
    measure.report("64 tokens of a tiny model (2 layers of 48)", "s", tiny, against="generate")
    growth = caches(model, options.cache_calls)
    grown = ", ".join(f"{size / 1e6:.1f} MB" for size in growth)
    print(f"\n{options.cache_calls} calls, caches dropped at random: workers grew by {grown}")
    wrong = threads(model, options.threads, options.calls)
    print(f"{options.threads} threads x {options.calls} calls: {wrong} answers differ from a solo run")
    figures = {"135M": small, "demo": real, "tiny": tiny, "growth_bytes": growth, "wrong": wrong}
    measure.save(options.json, "soak", figures)


if __name__ == "__main__":
    main()
