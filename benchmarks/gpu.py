"""Compares this library (one worker) with transformers on one GPU, with random bf16 weights.

    python -m benchmarks.gpu speed   [--shape 8B] [--batches 1 8 32] [--seconds 190] [--json OUT]
    python -m benchmarks.gpu restart [--shape 1B] [--json OUT]

`speed` measures prefill (the time to the first token), decode and memory of one contestant after another, the most
important contestant first. If the remaining time is too short for a contestant, `speed` names and skips it. Each figure
is written to OUT, and to the page beside OUT, as soon as it is measured.

The program fails if a figure does not measure what its name says: steps were not captured or compiled, transformers
would not have chosen the tokens, or tokens differ after a restart.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import statistics
import sys
import time
import traceback
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
from parallelformers_ng.sharding.encoding import Encoding

SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "8B-8-layers": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "vocab_size": 128256,
                    "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B-8-layers": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8, "vocab_size": 128256,
                     "num_attention_heads": 64, "num_key_value_heads": 8},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
PROMPT, TOKENS, ROUNDS = 512, 64, 3
RESTART_SECONDS = 30.0
ROWS_CHECKED = 2
MAX_BELOW = 0.5
"""Largest distance of a token's logit below the best logit of the same weights, in standard deviations of the logits.
bfloat16 changes logits by a few hundredths of it; a random token's logit is four of them below."""
BYTES_PER_WEIGHT = {"int4": 0.5625, "int8": 1.0, None: 2.0}
"""Quantization → bytes of a layer's weight, scales of groups of 32 included."""
HOW: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def build(shape: str, device: str) -> LlamaForCausalLM:
    """Return a Llama of the given shape with random weights, on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=40960, dtype=torch.bfloat16)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def finish(device: str) -> None:
    """Wait until the device has completed its queue."""
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Return bytes per second, read and written, of a copy of 1 GB on the device."""
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
        generate: function of prompt ids on the host and a number of tokens; returns prompt and new tokens.
        memory: bytes in use on the device.
        close: function that ends the contestant.
        fallback: function that returns why steps were not captured or compiled; "" if they were.
        quantize: quantization of the layers' weights; None for bf16.
    """

    generate: Callable[[torch.Tensor, int], torch.Tensor]
    memory: Callable[[], int]
    close: Callable[[], None]
    fallback: Callable[[], str] = str
    quantize: str | None = None


def whole(shape: str, device: str, **also: Any) -> Contestant:
    """Return transformers' own model in this process."""
    model = build(shape, device)

    def generate(ids: torch.Tensor, tokens: int) -> torch.Tensor:
        return model.generate(ids.to(device), max_new_tokens=tokens, min_new_tokens=tokens, **HOW, **also).cpu()

    return Contestant(generate, lambda: torch.cuda.memory_allocated() if device == "cuda" else 0, lambda: None)


def compiled(shape: str, device: str) -> Contestant:
    """Return transformers' own model in this process, with decode steps that transformers compiles."""
    before = compiled_graphs()
    contestant = whole(shape, device, cache_implementation="static")
    contestant.fallback = lambda: "" if compiled_graphs() > before else "torch compiled nothing"
    return contestant


def compiled_graphs() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def cut(shape: str, device: str, decode: Any, quantize: str | None = None) -> Contestant:
    """Return a model of this library with one worker."""
    handler = _FallbackReasons()
    logging.getLogger("parallelformers_ng").addHandler(handler)
    workers = {"device": device}
    model = parallelize(build(shape, device), 1, workers=workers, decode=decode, quantize=quantize, progress=False)

    def generate(ids: torch.Tensor, tokens: int) -> torch.Tensor:
        return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **HOW)

    def close() -> None:
        logging.getLogger("parallelformers_ng").removeHandler(handler)
        deployment_of(model).close()

    return Contestant(
        generate,
        lambda: sum(model.memory_allocated().values()),
        close,
        lambda: "; ".join(handler.reasons),
        quantize=quantize,
    )


class _FallbackReasons(logging.Handler):
    """A log handler that records the reasons why steps ran without capture."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()).startswith("generate runs without"):
            self.reasons.append(message)


CONTESTANTS: dict[str, Callable[[str, str], Contestant]] = {
    "parallelformers_ng, captured steps": lambda shape, device: cut(shape, device, "cuda_graphs"),
    "parallelformers_ng, captured steps, int8": lambda shape, device: cut(shape, device, "cuda_graphs", "int8"),
    "parallelformers_ng, captured steps, int4": lambda shape, device: cut(shape, device, "cuda_graphs", "int4"),
    "transformers, eager": whole,
    "parallelformers_ng, eager": lambda shape, device: cut(shape, device, "eager"),
    "transformers, static + compile": compiled,
}


class Clock:
    """A time limit for several pieces of work, and the time of the longest piece so far.

    Args:
        seconds: total time.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest = 0.0

    def has_time_for(self, name: str) -> bool:
        """Return whether a piece of work can end in time if it takes as long as the longest so far; print a line if it
        cannot."""
        if time.monotonic() + self._longest <= self._end:
            return True
        print(f"not begun, for lack of time: {name}", flush=True)
        return False

    def note(self, seconds: float) -> None:
        """Record the seconds of a piece of work."""
        self._longest = max(self._longest, seconds)


def speed(options: argparse.Namespace) -> list[str]:
    """Measure each contestant at each batch size, until the time is up. Returns a list of complaints."""
    bandwidth = copy_bandwidth(options.device)
    save(options, "copy bandwidth, GB/s", bandwidth / 1e9)
    contestants, batches = Clock(options.seconds), Clock(options.seconds)
    chosen: dict[str | None, dict[str, torch.Tensor]] = {}  # quantization → contestant → tokens
    wrong: list[str] = []
    for name in options.contestants:
        if not contestants.has_time_for(name):
            continue
        begun = time.monotonic()
        contestant = CONTESTANTS[name](options.shape, options.device)
        weights = weight_bytes(options.shape, contestant.quantize)
        for batch in options.batches:
            each = f"{name}, batch {batch}"
            if not batches.has_time_for(each):
                continue
            since = time.monotonic()
            figures, tokens = figures_of(contestant, batch)
            chosen.setdefault(contestant.quantize, {})[each] = tokens
            batches.note(time.monotonic() - since)
            if reason := contestant.fallback():
                wrong.append(f"{each}: {reason}")
                break
            figures["share of the copy bandwidth"] = figures["decode, steps/s"] * weights / bandwidth
            save(options, each, figures)
        contestant.close()
        del contestant
        free(options.device)
        contestants.note(time.monotonic() - begun)
    below: dict[str, float] = {}
    for quantize, tokens_of in chosen.items():
        below |= below_the_best(options, tokens_of, quantize)
        free(options.device)
    save(options, "tokens below the best, standard deviations", below)
    too_far = [each for each, distance in below.items() if not distance <= MAX_BELOW]
    return [*wrong, *(f"{each}: tokens that the model would not choose" for each in too_far)]


def free(device: str) -> None:
    """Free the memory of deleted objects."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def figures_of(contestant: Contestant, batch: int) -> tuple[dict[str, float], torch.Tensor]:
    """Return the medians of a contestant's figures, and the first rows of prompt and new tokens."""
    ids = torch.arange(batch * PROMPT).view(batch, PROMPT).remainder(200) + 3
    tokens = contestant.generate(ids, TOKENS)  # compilation or capture, not measured
    first, all_of_it = (
        statistics.median(measure.seconds(partial(contestant.generate, ids, count)) for _ in range(ROUNDS))
        for count in (1, TOKENS)
    )
    steps = (TOKENS - 1) / (all_of_it - first)
    figures = {
        "to the first token, ms": first * 1e3,
        "decode, steps/s": steps,
        "decode, tokens/s": steps * batch,
        "memory, GB": contestant.memory() / 1e9,
    }
    return figures, tokens[:ROWS_CHECKED]


@torch.inference_mode()
def below_the_best(
    options: argparse.Namespace, chosen: dict[str, torch.Tensor], quantize: str | None
) -> dict[str, float]:
    """Return, for each contestant, the largest distance of a chosen token's logit below the best logit, in standard
    deviations of the logits. transformers computes the logits after the same tokens, with the contestant's weights:
    int4 weights alone change the best tokens of a random model of 32 layers. Equal tokens are not required: after one
    close decision in bfloat16 all later tokens differ.

    Args:
        options: shape and device.
        chosen: name of a contestant → token ids, prompts included.
        quantize: quantization of the contestants' weights; None for bf16.
    """
    model, farthest = build(options.shape, options.device), {}
    if quantize is not None:
        round_weights(model, quantize)
    for name, ids in chosen.items():
        ids = ids.to(options.device)
        logits = model(ids[:, :-1], logits_to_keep=TOKENS).logits.float()
        logits_chosen = logits.gather(-1, ids[:, -TOKENS:, None]).squeeze(-1)
        farthest[name] = ((logits.amax(-1) - logits_chosen) / logits.std(-1)).max().item()
    return farthest


def round_weights(model: LlamaForCausalLM, quantize: str) -> None:
    """Quantize the weights of the decoder layers, and dequantize them."""
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            encoding = encoding_of(quantize, layer.in_features)
            layer.weight.copy_(encoding.decode(*encoding.encode(layer.weight), layer.weight.dtype))


def encoding_of(quantize: str, inputs: int) -> Encoding:
    """Return the encoding of a weight with `inputs` inputs: int4 in groups of 32, others with a scale per output."""
    return Encoding(quantize, -1, 32 if quantize == "int4" else inputs)


def weight_bytes(shape: str, quantize: str | None) -> float:
    """Return the bytes of all weights that a decode step reads: all weights except the embedding.

    Args:
        shape: name in SHAPES.
        quantize: quantization of the layers' weights; None for bf16. The head stays in bf16.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
    layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    return BYTES_PER_WEIGHT[quantize] * layers + 2 * model.lm_head.weight.numel()


def restart_of_two(options: argparse.Namespace) -> list[str]:
    """Measure the same as `restart` for one token of two ranks, which share a device if the device is no CPU."""
    from tests.devices.one_card.place import sharing_a_card  # imports pytest

    with sharing_a_card() if options.device == "cuda" else contextlib.nullcontext():
        return restart(options, ranks=2, tokens=1)


def restart(options: argparse.Namespace, ranks: int = 1, tokens: int = 4) -> list[str]:
    """Measure the time from a killed worker to the next answer; the restart copies the weights to the device. Returns a
    list of complaints."""
    ids_of_devices = [0] * ranks if options.device == "cuda" else None
    workers = {"device": options.device, "device_ids": ids_of_devices, "host_copy": True}
    name = "restart" if ranks == 1 else f"restart of {ranks} ranks"
    with parallelize(build(options.shape, options.device), ranks, workers=workers, progress=False) as model:
        ids = torch.arange(3, 19)[None]
        want = model.generate(ids, max_new_tokens=tokens, **HOW)
        incarnation = deployment_of(model).incarnation
        os.kill(deployment_of(model).pids[0], signal.SIGKILL)
        killed = time.monotonic()
        while deployment_of(model).incarnation == incarnation and time.monotonic() < killed + RESTART_SECONDS:
            time.sleep(0.01)
        got = model.generate(ids, max_new_tokens=tokens, **HOW)
        first = ids.shape[1] + 1  # later tokens may differ: the first call after a restart uses no recordings
        right = torch.equal(got[:, :first], want[:, :first])
        save(options, name, {"kill to answer, s": time.monotonic() - killed, "the same tokens": float(right)})
        if deployment_of(model).incarnation == incarnation:
            return [f"{name}: the workers were not started again within {RESTART_SECONDS} s"]
        return [] if right else [f"{name}: the tokens are others than before"]


def save(options: argparse.Namespace, name: str, figures: Any) -> None:
    """Add figures to the file, write the page again, and print the figures."""
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
    """Return all figures so far, in Markdown."""
    text = [
        "# On one GPU",
        "",
        "Written by `make gpu`: random weights, bf16 unless a name says otherwise; prompts of 512 tokens.",
        "",
    ]
    text += [", ".join(f"{name} {value}" for name, value in known["machine"].items()), ""]
    for shape, figures in known.items():
        if shape == "machine":
            continue
        text += [f"## {shape}", "", "| what | figures |", "| --- | --- |"]
        for name, values in figures.items():
            values = values if isinstance(values, dict) else {"": values}
            text.append(
                f"| {name} | {'; '.join(f'{unit} {_short(value)}'.strip() for unit, value in values.items())} |"
            )
        text.append("")
    return "\n".join(text)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def complaint(name: str, error: BaseException) -> str:
    """Print the traceback of a measurement's error, and return the complaint."""
    traceback.print_exception(error)
    return f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def end_with(run: Callable[[argparse.Namespace], list[str]], options: argparse.Namespace) -> None:
    """Print the machine, run a benchmark, and end the process with an error if the benchmark returns wrong results."""
    logging.basicConfig(level=logging.WARNING)  # shows the reasons why steps were not captured, or kernels not used
    print(measure.machine())
    if wrong := run(options):
        sys.exit("\n".join(f"WRONG: {each}" for each in wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["speed", "restart"])
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    end_with({"speed": speed, "restart": restart}[options.what], options)


if __name__ == "__main__":
    main()
