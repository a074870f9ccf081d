"""Measures 16 concurrent mixed requests over HTTP: `parallelformers-ng serve` compared with `transformers serve`.

Ours has two CPU ranks; `transformers serve` has two threads, with and without its batching. The random model has
SmolLM2-135M's shape; the servers take turns.

    python -m benchmarks.serving [--rounds 3] [--dtype float32] [--json OUT]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import measure
from benchmarks.batching import SHAPE, THREADS, whole

SECONDS = 300.0
PORT, DIRECTORY = "{port}", "{directory}"
BESIDE = str(Path(sys.executable).parent / "transformers")
OURS = "parallelformers-ng serve"
COMMANDS = {
    "transformers serve": [BESIDE, "serve", DIRECTORY, "--port", PORT, "--host", "127.0.0.1"],
    "transformers serve, batching": [
        *(BESIDE, "serve", DIRECTORY, "--port", PORT, "--host", "127.0.0.1", "--continuous-batching"),
        *("--attn-implementation", "sdpa"),
    ],
    OURS: [
        *(sys.executable, "-m", "parallelformers_ng", "serve", DIRECTORY, "--port", PORT),
        *("--num-gpus", str(THREADS), "--device", "cpu", "--served-model-name", DIRECTORY),
    ],
}


def save(directory: str, dtype: torch.dtype) -> None:
    """Save a random model, and a tokenizer with one word for each token."""
    model = whole(dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def served(command: list[str], directory: str) -> Iterator[Callable[[list[dict[str, Any]]], float]]:
    """Start a server that is stopped between measurements, because an idle server may poll and disturb other servers.
    Yields a function that sends requests and returns tokens per second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    filled = [word.format(port=port, directory=directory) for word in command]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(filled, env=environment, stdout=sys.stderr)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False, limits=httpx.Limits()
        ) as client:
            end = time.monotonic() + SECONDS
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{' '.join(filled)} did not start: {process.poll()}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.1)

            def ask(requests: list[dict[str, Any]]) -> float:
                process.send_signal(signal.SIGCONT)
                try:
                    return tokens_per_second(client, requests)
                finally:
                    process.send_signal(signal.SIGSTOP)

            yield ask
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)


def tokens_per_second(client: httpx.Client, requests: list[dict[str, Any]]) -> float:
    """Send all requests at once, and check that each answer has the requested number of tokens. Returns tokens per
    second."""

    def ask(body: dict[str, Any]) -> int:
        answer = client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        words = answer.json()["choices"][0]["message"]["content"].split()
        assert len(words) == body["max_tokens"], (len(words), body["max_tokens"])
        return len(words)

    with ThreadPoolExecutor(len(requests)) as pool:
        token_counts: list[int] = []
        seconds = measure.seconds(lambda: token_counts.extend(pool.map(ask, requests)))
    return sum(token_counts) / seconds


def mixed(model: str) -> list[dict[str, Any]]:
    """Return 16 requests with prompts of 8 to 128 words and answers of 8 to 64 tokens."""
    numbers = torch.Generator().manual_seed(3)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=numbers))

    return [
        {
            "model": model,
            "messages": [{"role": "user", "content": " ".join(f"w{number(5, 49_000)}" for _ in range(number(8, 128)))}],
            "max_tokens": number(8, 64),
            "temperature": 0,
        }
        for _ in range(16)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        save(directory, getattr(torch, options.dtype))
        requests = mixed(directory)
        contestants = {}
        for name, command in COMMANDS.items():
            ask = stack.enter_context(served(command, directory))
            ask(requests[:2])
            contestants[name] = functools.partial(ask, requests)
        figures = measure.interleave(contestants, options.rounds)
    measure.report("16 mixed requests", "tokens/s", figures, against="transformers serve", higher_is_better=True)
    measure.save(options.json, f"serving {options.dtype}", figures)


if __name__ == "__main__":
    main()
