"""Measures many callers: threads that call `generate`, one call with all prompts, and OpenVINO's continuous batching.

    python -m benchmarks.callers [--size 600M] [--dtype bfloat16] [--rounds 3] [--patience 200] [--openvino PYTHON]

The model is a Llama with random weights, on two CPU ranks. `--openvino` is an interpreter with `openvino-genai` and
`optimum-intel[openvino]`; its pipeline gets as many threads as there are ranks. All contestants run in turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from benchmarks.decode import SHAPES
from parallelformers_ng import parallelize

RANKS = 2
TASKS = {
    "600M": [(16, 64, 32), (16, 8, 48), (16, 256, 4), (4, 8, 48)],
    "135M": [(16, 64, 64)],
}
"""Callers, tokens of a prompt, and new tokens."""
_PEER = str(Path(__file__).with_name("openvino_peer.py"))


def whole(
    size: str, dtype: torch.dtype, cls: type[LlamaForCausalLM] = LlamaForCausalLM, **settings: Any
) -> LlamaForCausalLM:
    """Return a random Llama of a shape of `benchmarks.decode`, the same at each call; `settings` change the shape."""
    torch.manual_seed(0)
    shape = SHAPES[size] | settings
    return cls(LlamaConfig(**shape, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0)).to(dtype).eval()


def prompts(count: int, length: int, vocabulary: int) -> torch.Tensor:
    """Return random token ids `[count, length]`."""
    return torch.randint(5, vocabulary, (count, length))


def in_threads(model: Any, ids: torch.Tensor, new: int) -> float:
    """Return the seconds of one call of `generate` per prompt, each in a thread of its own."""
    with ThreadPoolExecutor(len(ids)) as pool:
        return measure.seconds(lambda: list(pool.map(lambda row: in_one_call(model, row[None], new), ids)))


def in_one_call(model: Any, ids: torch.Tensor, new: int) -> float:
    """Return the seconds of one call of `generate` with all prompts."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    return measure.seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))


def tokens_per_second(run: Callable[[torch.Tensor, int], float], sizes: tuple[int, int, int], new: int) -> float:
    """Return the new tokens per second of all prompts together. Prompts are new each time, so no prefix is known.

    Args:
        run: contestant.
        sizes: arguments of `prompts`.
        new: new tokens of each prompt.
    """
    return sizes[0] * new / run(prompts(*sizes), new)


def peer(python: str, directory: str, dtype: str) -> Callable[[torch.Tensor, int], float]:
    """Start OpenVINO's pipeline. Returns a function that runs prompts through it and returns the seconds."""
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    command = [python, _PEER, directory, precision, str(RANKS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    json.loads(process.stdout.readline())

    def run(ids: torch.Tensor, new: int) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps({"prompts": ids.tolist(), "new": new}), file=process.stdin, flush=True)
        return float(json.loads(process.stdout.readline()))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="600M", choices=list(TASKS))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=200, help="prefill_patience in milliseconds")
    parser.add_argument("--openvino", metavar="PYTHON", help="interpreter with openvino-genai and optimum-intel")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    print(measure.machine())
    vocabulary = SHAPES[options.size]["vocab_size"]
    model = whole(options.size, getattr(torch, options.dtype))
    with tempfile.TemporaryDirectory() as directory:
        run_peer = None
        if options.openvino:
            model.save_pretrained(directory)
            run_peer = peer(options.openvino, directory, options.dtype)
        batching = {"prefill_patience": options.patience}
        sharded = parallelize(model, RANKS, workers={"device": "cpu"}, batching=batching, progress=False)
        contestants: dict[str, Callable[[torch.Tensor, int], float]] = {
            "threads": lambda ids, new: in_threads(sharded, ids, new),
            "one call": lambda ids, new: in_one_call(sharded, ids, new),
            **({} if run_peer is None else {"OpenVINO": run_peer}),
        }
        for run in contestants.values():  # the first calls are slower
            run(prompts(16, 16, vocabulary), 8)
        results: dict[str, Any] = {}
        for count, length, new in TASKS[options.size]:
            title = f"{count} callers, prompts of {length}, {new} new"
            figures = measure.interleave(
                {
                    name: partial(tokens_per_second, run, (count, length, vocabulary), new)
                    for name, run in contestants.items()
                },
                options.rounds,
            )
            measure.report(title, "tokens/s", figures, "threads", higher_is_better=True)
            results[title] = figures
        measure.save(options.json, f"callers, {options.size}, {options.dtype}", results)
        sharded.deparallelize()


if __name__ == "__main__":
    main()
