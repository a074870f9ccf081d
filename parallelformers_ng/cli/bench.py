"""Compares parallelization with one process on this machine: prefill and decode of a model."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.api import parallelize, start_group
from parallelformers_ng.checkpoint.model_class import empty_model
from parallelformers_ng.errors import ParallelError, UnsupportedModelError
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.sharding.plan import ShardPlan

_READ_BYTES, _READ_PASSES = 512 << 20, 8
_SHORT_PROMPT = 8
ONE_PROCESS = "one process"


@dataclass
class Report:
    """Figures of one model, one value for each round.

    Attributes:
        model: name or path of the model.
        random_weights: whether it came without weights.
        device, ranks: device and number of the workers.
        prompt, tokens: lengths in tokens.
        weight_bytes: bytes of weights that a decoded token reads: all but the rows of an embedding that is not tied to
            the head (a mixture of experts reads fewer).
        bandwidth: bytes per second that the devices read together, measured before the first round.
        scheme: scheme of the ranks' weights, None for the model's own.
        held_bytes: bytes of weights that a decoded token reads on the ranks.
        prefill, decode: contestant → tokens per second, round by round.
    """

    model: str
    random_weights: bool
    device: str
    ranks: int
    prompt: int
    tokens: int
    weight_bytes: int
    bandwidth: float
    scheme: str | None = None
    held_bytes: int = 0
    prefill: dict[str, list[float]] = field(default_factory=dict)
    decode: dict[str, list[float]] = field(default_factory=dict)

    def bandwidth_share(self, name: str) -> float:
        """Return the part of the bandwidth that a contestant's median decode speed amounts to."""
        read = self.held_bytes if self.scheme and name != ONE_PROCESS else self.weight_bytes
        return statistics.median(self.decode[name]) * read / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """Everything, with the medians and shares, as JSON takes it."""
        medians = {
            task: {name: statistics.median(values) for name, values in figures.items()}
            for task, figures in (("prefill", self.prefill), ("decode", self.decode))
        }
        shares = {name: self.bandwidth_share(name) for name in self.decode}
        return dataclasses.asdict(self) | {"median": medians, "bandwidth_share": shares}

    def __str__(self) -> str:
        weights = "random weights" if self.random_weights else "its weights"
        lines = [
            f"{self.model}, {weights}, {self.weight_bytes / 1e9:.2f} GB, on {self.ranks} {self.device} ranks",
            f"read bandwidth {self.bandwidth / 1e9:.1f} GB/s: {self.bandwidth / self.weight_bytes:.1f} tok/s at most",
        ]
        if self.scheme:
            lines.append(
                f"the ranks read {self.held_bytes / 1e9:.2f} GB for a token, in {self.scheme} where that is held"
            )
        for title, figures in (
            (f"prefill of {self.prompt} tokens", self.prefill),
            (f"decode of {self.tokens} tokens", self.decode),
        ):
            lines.append(f"{title} [tokens/s]")
            for name, values in figures.items():
                share = f"   {self.bandwidth_share(name):4.0%} of the bandwidth" if figures is self.decode else ""
                lines.append(f"  {name:<13} median {statistics.median(values):9.1f}   best {max(values):9.1f}{share}")
        return "\n".join(lines)

    def plot(self, path: str) -> None:
        """Draw the medians as bars with their values, best and worst round as whiskers, to an image file."""
        check_plotting()
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        figure.suptitle(f"{self.model}, {self.ranks} {self.device} ranks")
        both = (("prefill", self.prompt, self.prefill), ("decode", self.tokens, self.decode))
        for axes, (title, tokens, figures) in zip(figure.subplots(1, 2), both, strict=True):
            middles = [statistics.median(values) for values in figures.values()]
            below = [middle - min(values) for middle, values in zip(middles, figures.values(), strict=True)]
            above = [max(values) - middle for middle, values in zip(middles, figures.values(), strict=True)]
            bars = axes.bar(list(figures), middles, yerr=(below, above), capsize=6, width=0.6)
            axes.bar_label(bars, fmt="{:.1f}", label_type="center", color="white", fontweight="bold")
            axes.set_title(f"{title}, {tokens} tokens")
            axes.set_ylabel("tokens per second")
            if title == "decode":
                limit = self.bandwidth / self.weight_bytes
                axes.axhline(limit, linestyle="--", color="black", label=f"limit of the bandwidth: {limit:.1f}")
                figure.legend(loc="outside right upper")  # beside the bars, not over them
        figure.savefig(path, dpi=150)


def bench(
    model: str,
    num_gpus: int = 2,
    *,
    device: str = "auto",
    prompt: int = 512,
    tokens: int = 64,
    rounds: int = 5,
    baseline: bool = True,
    dtype: str | None = None,
    revision: str | None = None,
    quantize: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure a model on its workers and, turn by turn, in this process with all its threads (or on one GPU).

    Args:
        model: a model folder, a name on the hub, or a `config.json` or model type, which get random weights.
        num_gpus: number of workers.
        device: "cpu", "cuda" or "auto".
        prompt: tokens of the prompt in the prefill figure; decode starts from a short one.
        tokens: tokens decoded in each round.
        rounds: how often each is measured, after one round to warm up.
        baseline: whether one process is measured too. It holds the model a second time.
        dtype: "float32", "bfloat16", …; by default the model's own.
        revision: branch, tag or commit on the hub.
        quantize: scheme in which the ranks hold weights; one process has them as they are.
        say: is told what is being done.

    Raises:
        UnsupportedModelError: the model does not generate.
        ParallelError: `parallelize` failed.
    """
    if min(prompt, tokens, rounds) < 1:
        raise ValueError(f"bench: prompt {prompt}, tokens {tokens} and rounds {rounds} must all be at least 1")
    skeleton = empty_model(model, revision)
    if not skeleton.can_generate():
        raise UnsupportedModelError(f"bench: {type(skeleton).__name__} does not generate, so there is no decode step")
    limit = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max(prompt, _SHORT_PROMPT + tokens) + 1 > limit:
        raise ValueError(f"bench: prompt {prompt} and tokens {tokens} exceed the {limit} positions of {model}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    has_weights = Path(model).is_dir() or not (Path(model).is_file() or model == skeleton.config.model_type)

    def load() -> PreTrainedModel:
        kind = dtype or skeleton.dtype
        if has_weights:
            return type(skeleton).from_pretrained(model, dtype=kind, revision=revision).eval()
        torch.manual_seed(0)
        return type(skeleton)._from_config(skeleton.config, dtype=torch.float32).to(_dtype(kind)).eval()

    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    try:
        say("measuring the read bandwidth")
        speed = read_bandwidth(device, num_gpus)
        say(f"loading {model}")
        with start_group(num_gpus, device=device) as group:
            cut = parallelize(load(), workers=group, quantize=quantize, progress=False)
            contestants = {f"{num_gpus} ranks": cut}
            if baseline:
                contestants[ONE_PROCESS] = load().to("cuda:0" if device == "cuda" else "cpu")
            weights = _bytes_read(skeleton) * _dtype(dtype or skeleton.dtype).itemsize // skeleton.dtype.itemsize
            weight_bytes = _bytes_held(skeleton, cut.shard_plan)
            report = Report(
                model, not has_weights, device, num_gpus, prompt, tokens, weights, speed, quantize, weight_bytes
            )
            for round_ in range(rounds + 1):
                say(f"round {round_} of {rounds}" if round_ else "warming up")
                for name, contestant in contestants.items():
                    filled, measured = _prefill(contestant, prompt), _decode(contestant, tokens)
                    if round_:
                        report.prefill.setdefault(name, []).append(filled)
                        report.decode.setdefault(name, []).append(measured)
    finally:
        torch.set_num_threads(threads)
    return report


def read_bandwidth(device: str, count: int = 1) -> float:
    """Return bytes per second of sums over a tensor far larger than any cache, the best of a few passes.

    Args:
        device: "cpu", which all threads of this process read together, or "cuda".
        count: number of devices, each taken to be as fast as the first; of no meaning on CPU.
    """
    data = torch.ones(_READ_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(_READ_PASSES):
        start = time.perf_counter()
        data.sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best * (count if device == "cuda" else 1)


def check_plotting() -> None:
    """Raise ParallelError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ParallelError(f"bench: a plot needs matplotlib ({error}): pip install matplotlib") from error


def _bytes_read(model: PreTrainedModel) -> int:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or model.config.get_text_config().tie_word_embeddings
    whole = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    if tied and head is not None and id(head.weight) != id(embedding.weight):
        whole.pop(id(head.weight), None)  # on meta, ties may be missing
    return sum(whole.values()) - (0 if tied else embedding.weight.nbytes)


def _bytes_held(model: PreTrainedModel, plan: ShardPlan) -> int:
    """Return the same of weights as ranks hold them, each once."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is None or model.config.get_text_config().tie_word_embeddings
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left = None if tied else names[id(embedding.weight)]
    return sum(plan.bytes_held(t.name) for t in plan.stored() if not t.is_buffer and t.name != left)


def _prefill(model: Any, prompt: int) -> float:
    """Return tokens per second of the prompt's pass, the choice of the first token included."""
    return prompt / _seconds(model, prompt, 1)


def _decode(model: Any, tokens: int) -> float:
    """Return tokens per second after a short prompt, whose own pass is taken off."""
    first = _seconds(model, _SHORT_PROMPT, 1)
    return tokens / max(_seconds(model, _SHORT_PROMPT, tokens + 1) - first, 1e-9)


def _seconds(model: Any, prompt: int, tokens: int) -> float:
    """Wall time of a greedy `generate` that makes exactly `tokens` tokens."""
    device = model.device if model.device.type != "meta" else "cpu"
    ids = (torch.arange(prompt, device=device) % (model.config.get_text_config().vocab_size - 4) + 4)[None]
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
    )
    return time.perf_counter() - start


def _dtype(kind: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, kind, None) if isinstance(kind, str) else kind
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"bench: {kind!r} is no data type of torch; float32, bfloat16 and float16 are")
    return dtype
