"""Measures decode with weights in fp32, int8 and int4, compared with bf16, on two CPU ranks.

The random model has Qwen3-0.6B's shape; contestants take turns. If you name an interpreter with `llama_cpp` and `gguf`,
llama.cpp with two threads is measured, too.

    python -m benchmarks.quantized [--rounds 5] [--size 600M] [--only bf16 int8] [--context 32]
                                   [--llama-cpp PYTHON] [--peer Q8_0]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.callers import whole
from benchmarks.decode import SHAPES
from parallelformers_ng import parallelize

QUANTIZE: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "bf16": None,
    "int8, head in bf16": {"scheme": "int8"},
    "int8": {"scheme": "int8", "embeddings": True},
    "int4": {"scheme": "int4", "embeddings": True},
}
TOKENS = 48
_PEER = str(Path(__file__).with_name("llama_peer.py"))


def tokens_per_second(model: Any, context: int) -> float:
    """Return the tokens per second after the first token, for a prompt of `context` tokens."""
    ids = torch.arange(100, 100 + context)[None]
    first, all_of_them = (
        measure.seconds(lambda count=count: model.generate(ids, max_new_tokens=count, do_sample=False))  # type: ignore[misc]
        for count in (1, TOKENS + 1)
    )
    return TOKENS / (all_of_them - first)


@contextlib.contextmanager
def peer(python: str, kind: str, size: str, context: int) -> Iterator[Callable[[], float]]:
    """Start llama.cpp in another interpreter. Yields a function that returns its tokens per second."""
    shape = SHAPES[size]
    with tempfile.TemporaryDirectory() as folder:
        command = [python, _PEER, folder, kind, *(f"{name}={value}" for name, value in shape.items())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{' '.join(command)} did not start")

            def ask() -> float:
                print(context, TOKENS, file=process.stdin, flush=True)
                return float(process.stdout.readline())  # type: ignore[union-attr]

            yield ask
            process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="600M", choices=SHAPES)
    parser.add_argument("--only", nargs="+", choices=QUANTIZE, default=list(QUANTIZE)[1:], metavar="WEIGHTS")
    parser.add_argument("--context", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--peer", choices=("Q8_0", "BF16", "F32"), default="Q8_0", help="its GGUF type")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Callable[[], float]] = {}
        for name in options.only:
            print(f"making {name}", file=sys.stderr)
            model = parallelize(
                whole(options.size, torch.float32 if name == "fp32" else torch.bfloat16),
                2,
                workers={"device": "cpu"},
                quantize=QUANTIZE[name],
                batching=False,
                progress=False,
            )
            stack.enter_context(model)
            print(f"{name}: {model.memory_allocated()} bytes")
            contestants[name] = partial(tokens_per_second, model, options.context)
            contestants[name]()
        if options.llama_cpp is not None:
            other = f"llama.cpp {options.peer}"
            contestants[other] = stack.enter_context(
                peer(options.llama_cpp, options.peer, options.size, options.context)
            )
            contestants[other]()
        figures = measure.interleave(contestants, options.rounds)
        for against in {options.only[0]: None, list(figures)[-1]: None}:
            measure.report(f"decode, {options.size}", "tokens/s", figures, against=against, higher_is_better=True)
        measure.save(options.json, f"quantized {options.size}", figures)


if __name__ == "__main__":
    main()
