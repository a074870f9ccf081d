"""One GPU: this library with one worker beside transformers, with random bf16 weights. Never run on one: unmeasured.

    python -m benchmarks.gpu speed   [--shape 8B] [--batches 1 8 32] [--seconds 190] [--json OUT]
    python -m benchmarks.gpu restart [--shape 1B] [--json OUT]
    python -m benchmarks.gpu profile [--shape 1B] [--json OUT]

`speed` measures prefill (the time to the first token), decode and memory of one contestant after another, the most
telling first, until its time is up. Each figure is in OUT, and on the page beside it, as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of

SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
PROMPT, TOKENS, ROUNDS = 512, 64, 3
RESTART_SECONDS = 120.0
HOW: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def build(shape: str, device: str) -> LlamaForCausalLM:
    """Llama of that shape, random weights, on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, dtype=torch.bfloat16)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def finish(device: str) -> None:
    """Wait for what was queued on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Bytes per second read and written by a copy of 1 GB on the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        finish(device)

    copy()
    return 2 * source.nbytes / min(measure.seconds(copy) for _ in range(5))


@dataclass
class Contestant:
    """A model that is ready.

    Attributes:
        generate: so many tokens for a prompt of the host.
        memory: bytes in use on the device.
        close: ends it.
    """

    generate: Callable[[torch.Tensor, int], torch.Tensor]
    memory: Callable[[], int]
    close: Callable[[], None]


def whole(shape: str, device: str, **also: Any) -> Contestant:
    """transformers in this process."""
    model = build(shape, device)

    def generate(ids: torch.Tensor, tokens: int) -> torch.Tensor:
        return model.generate(ids.to(device), max_new_tokens=tokens, min_new_tokens=tokens, **HOW, **also).cpu()

    return Contestant(generate, lambda: torch.cuda.memory_allocated() if device == "cuda" else 0, lambda: None)


def cut(shape: str, device: str, decode: Any) -> Contestant:
    """This library with one worker."""
    model = parallelize(build(shape, device), 1, workers={"device": device}, decode=decode, progress=False)

    def generate(ids: torch.Tensor, tokens: int) -> torch.Tensor:
        return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **HOW)

    return Contestant(generate, lambda: sum(model.memory_allocated().values()), deployment_of(model).close)


CONTESTANTS: dict[str, Callable[[str, str], Contestant]] = {
    "transformers, eager": whole,
    "parallelformers_ng, captured steps": lambda shape, device: cut(shape, device, "cuda_graphs"),
    "parallelformers_ng, eager": lambda shape, device: cut(shape, device, "eager"),
    "transformers, static + compile": lambda shape, device: whole(shape, device, cache_implementation="static"),
}


def speed(options: argparse.Namespace) -> None:
    """What each contestant does at each batch size, until the time is up."""
    end = time.monotonic() + options.seconds
    bandwidth, weights = copy_bandwidth(options.device), weight_bytes(options.shape)
    save(options, "copy bandwidth, GB/s", bandwidth / 1e9)
    wanted: dict[int, torch.Tensor] = {}
    for name in options.contestants:
        if time.monotonic() > end:
            print(f"the time is up before {name}", flush=True)
            return
        contestant = CONTESTANTS[name](options.shape, options.device)
        for batch in options.batches:
            if time.monotonic() > end:
                print(f"the time is up before {name}, batch {batch}", flush=True)
                break
            figures = figures_of(contestant, batch, wanted)
            figures["share of the copy bandwidth"] = figures["decode, steps/s"] * weights / bandwidth
            save(options, f"{name}, batch {batch}", figures)
        contestant.close()
        del contestant
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def figures_of(contestant: Contestant, batch: int, wanted: dict[int, torch.Tensor]) -> dict[str, float]:
    """Medians, and the share of tokens that are those of the contestant which was first at this batch size."""
    ids = torch.arange(batch * PROMPT).view(batch, PROMPT).remainder(200) + 3
    tokens = contestant.generate(ids, TOKENS)  # compiles, or captures, which is not what is measured
    first, all_of_it = (
        statistics.median(measure.seconds(partial(contestant.generate, ids, count)) for _ in range(ROUNDS))
        for count in (1, TOKENS)
    )
    steps = (TOKENS - 1) / (all_of_it - first)
    return {
        "to the first token, ms": first * 1e3,
        "decode, steps/s": steps,
        "decode, tokens/s": steps * batch,
        "memory, GB": contestant.memory() / 1e9,
        "tokens as the first's": (tokens == wanted.setdefault(batch, tokens)).float().mean().item(),
    }


def weight_bytes(shape: str) -> int:
    """Of all weights that a step reads, in bf16: all but the table of embeddings."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
    return 2 * (sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel())


def restart(options: argparse.Namespace) -> None:
    """From a kill to the next answer, the weights copied to the device again."""
    workers = {"device": options.device, "host_copy": True}
    with parallelize(build(options.shape, options.device), 1, workers=workers, progress=False) as model:
        ids = torch.arange(3, 19)[None]
        want = model.generate(ids, max_new_tokens=4, **HOW)
        incarnation = deployment_of(model).incarnation
        os.kill(deployment_of(model).pids[0], signal.SIGKILL)
        killed = time.monotonic()
        while deployment_of(model).incarnation == incarnation and time.monotonic() < killed + RESTART_SECONDS:
            time.sleep(0.01)
        right = torch.equal(model.generate(ids, max_new_tokens=4, **HOW), want)
        save(options, "restart", {"kill to answer, s": time.monotonic() - killed, "the same tokens": float(right)})


def profile(options: argparse.Namespace) -> None:
    """Where 16 decode steps of transformers' own loop go, which is that of a worker too: operators by their time."""
    generate = whole(options.shape, options.device).generate
    ids = torch.arange(3, 19)[None]
    generate(ids, 4)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        generate(ids, 17)
    order = "self_cuda_time_total" if options.device == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


def save(options: argparse.Namespace, name: str, figures: Any) -> None:
    """Add figures to the file, write the page anew, and say them."""
    print(f"{options.shape}: {name}: {figures}", flush=True)
    if not options.json:
        return
    file = Path(options.json)
    known = json.loads(file.read_text()) if file.exists() else {}
    known["machine"] = measure.machine()
    known.setdefault(options.shape, {})[name] = figures
    file.write_text(json.dumps(known, indent=1))
    file.with_suffix(".md").write_text(page(known))


def page(known: dict[str, Any]) -> str:
    """All figures so far, in Markdown."""
    text = ["# On one GPU", "", "Written by `make gpu`: random bf16 weights, prompts of 512 tokens, 64 new ones.", ""]
    text += [", ".join(f"{name} {value}" for name, value in known["machine"].items()), ""]
    for shape, figures in known.items():
        if shape == "machine":
            continue
        text += [f"## {shape}", "", "| what | figures |", "| --- | --- |"]
        for name, values in figures.items():
            values = values if isinstance(values, dict) else {"": values}
            text.append(f"| {name} | {'; '.join(f'{unit} {value:.4g}'.strip() for unit, value in values.items())} |")
        text.append("")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["speed", "restart", "profile"])
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)  # why steps were not captured, above all
    print(measure.machine())
    {"speed": speed, "restart": restart, "profile": profile}[options.what](options)


if __name__ == "__main__":
    main()
