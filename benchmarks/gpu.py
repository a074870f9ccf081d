"""Decode of a 7B-shaped model on one GPU: parallelformers_ng with one worker, as it is, with `cuda_graphs=True` and
with `compile=True`, against transformers' eager `generate` and its static cache with `torch.compile`.

    python -m benchmarks.gpu [--layers 32] [--tokens 64] [--rounds 5] [--json OUT]

Random bf16 weights, batch 1. Prints tokens per second and the share of the copy bandwidth measured on the spot.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from parallelformers_ng import parallelize


def build(layers: int) -> LlamaForCausalLM:
    """Llama 2 7B's shape with `layers` layers, random weights, on the GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=4096, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def copy_bandwidth() -> float:
    """Bytes per second read and written by a device-to-device copy of 1 GB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    copy()
    return 2 * source.nbytes / min(measure.seconds(copy) for _ in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s")
    prompt = torch.arange(3, 19)[None]
    how: dict[str, Any] = {
        "max_new_tokens": options.tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }

    whole = build(options.layers)
    weights = sum(p.nbytes for p in whole.parameters())
    cut = parallelize(build(options.layers), 1, workers={"device": "cuda"})
    compiled = parallelize(build(options.layers), 1, workers={"device": "cuda"}, decode="compile")
    captured = parallelize(build(options.layers), 1, workers={"device": "cuda"}, decode="cuda_graphs")
    want = whole.generate(prompt.cuda(), **how).cpu()
    # The first call of the latter two compiles, or captures.
    for name, model in {"as it is": cut, "compiled": compiled, "captured": captured}.items():
        print(f"greedy tokens equal, {name}:", torch.equal(model.generate(prompt, **how), want))

    def speed(model: Any, inputs: torch.Tensor, **also: Any) -> float:
        return options.tokens / measure.seconds(lambda: model.generate(inputs, **how, **also).cpu())

    one = "transformers, eager"
    contestants = {
        one: lambda: speed(whole, prompt.cuda()),
        "transformers, static + compile": lambda: speed(whole, prompt.cuda(), cache_implementation="static"),
        "parallelformers_ng, 1 worker": lambda: speed(cut, prompt),
        "parallelformers_ng, compile=True": lambda: speed(compiled, prompt),
        "parallelformers_ng, cuda_graphs=True": lambda: speed(captured, prompt),
    }
    for contestant in contestants.values():  # compilation is not what is measured
        contestant()
    figures = measure.interleave(contestants, options.rounds)
    measure.report("decode, batch 1, bf16", "tokens/s", figures, against=one, higher_is_better=True)
    for name, values in figures.items():
        print(f"  {name:<36} {statistics.median(values) * weights / bandwidth:6.1%} of the copy bandwidth")
    measure.save(options.json, "gpu decode", {**figures, "copy bandwidth B/s": bandwidth})
    for model in (cut, compiled, captured):
        model.deparallelize()


if __name__ == "__main__":
    main()
