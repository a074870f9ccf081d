"""Prefill and decode of Llama-shaped models with random weights: two workers of one thread each against one process
with two.

    python -m benchmarks.decode [--sizes 135M 600M] [--tokens 32] [--rounds 5] [--json OUT]

Also prints the share of the memory bandwidth measured on the spot, since a decode step reads every weight once.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from parallelformers_ng import parallelize

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3},
    "600M": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 20,
             "num_attention_heads": 16, "num_key_value_heads": 8},
}  # fmt: skip
PROMPT = 512


def build(size: str) -> LlamaForCausalLM:
    """A model of that shape in fp32, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True, **SHAPES[size])
    return LlamaForCausalLM(config).eval()


def bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read in a matrix-vector product over 512 MB."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    matrix, vector = torch.randn(16384, 8192), torch.randn(8192)
    torch.mv(matrix, vector)
    best = min(measure.seconds(lambda: torch.mv(matrix, vector)) for _ in range(7))
    torch.set_num_threads(before)
    return matrix.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded in each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.workers)
    print(measure.machine())
    read = bandwidth(options.workers)
    print(f"read bandwidth, {options.workers} threads: {read / 1e9:.1f} GB/s")
    short, long = torch.arange(3, 11)[None], torch.arange(3, 3 + PROMPT)[None]

    for size in options.sizes:
        whole, cut = build(size), build(size)
        weights = sum(p.nbytes for p in whole.parameters())
        parallelize(cut, options.workers, device="cpu")

        def decode(model: Any) -> float:
            """Tokens per second of greedy decoding, the prompt's own pass apart."""
            how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            first = measure.seconds(lambda: model.generate(short, max_new_tokens=1, **how))
            every = measure.seconds(lambda: model.generate(short, max_new_tokens=options.tokens + 1, **how))
            return options.tokens / (every - first)

        def prefill(model: Any) -> float:
            with torch.inference_mode():
                return PROMPT / measure.seconds(lambda: model(long, use_cache=True, logits_to_keep=1))

        one, ours = "transformers, one process", "parallelformers_ng"
        for warm in (whole, cut):
            decode(warm)
            prefill(warm)
        figures = measure.interleave({one: lambda w=whole: decode(w), ours: lambda c=cut: decode(c)}, options.rounds)
        measure.report(f"decode, {size} ({weights / 1e9:.2f} GB fp32)", "tokens/s", figures, one, higher_is_better=True)
        for name, values in figures.items():
            print(f"  {name:<34} {statistics.median(values) * weights / read:6.1%} of the read bandwidth")
        measure.save(options.json, f"decode {size}", {**figures, "read bandwidth B/s": read})
        figures = measure.interleave({one: lambda w=whole: prefill(w), ours: lambda c=cut: prefill(c)}, options.rounds)
        measure.report(f"prefill of {PROMPT} tokens, {size}", "tokens/s", figures, one, higher_is_better=True)
        measure.save(options.json, f"prefill {size}", figures)
        cut.deparallelize()
        del whole, cut


if __name__ == "__main__":
    main()
