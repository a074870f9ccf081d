"""Measures prefill and decode of a model on this machine, on workers and in one process."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.api import parallelize
from parallelformers_ng.checkpoint.model_class import empty_model
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.model.groups import start_group
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.sharding.casting import target_dtype
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan

_READ_BYTES, _READ_PASSES = 512 << 20, 8
_SHORT_PROMPT = 8
_TURN_SECONDS = 0.3  # short prompts are repeated until a measurement takes this long
ONE_PROCESS = "one process"


@dataclass
class Report:
    """The measured speeds of one model.

    Attributes:
        model: name or path of the model.
        random_weights: whether the model has random weights.
        device, ranks: device type ("cpu" or "cuda") and number of the workers.
        prompt, tokens: length of the prompt and number of decoded tokens.
        weight_bytes: bytes of weights that one process reads for a decoded token: all weights except an embedding that
            is not tied to the head. A mixture of experts reads fewer bytes.
        bandwidth: memory bandwidth of all devices together, in bytes per second, measured before the first round.
        scheme: quantization scheme of the ranks' weights; None for the model's own weights.
        held_bytes: bytes of weights that all ranks together read for a decoded token.
        prefill, decode: "2 ranks" or "one process" → tokens per second of each round.
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
        """Share of the memory bandwidth that the median decode speed of `name` ("2 ranks", …) uses; at most 1.

        The share is too large for a mixture of experts, which reads fewer bytes than the report counts.
        """
        token_bytes = self.held_bytes if self.scheme and name != ONE_PROCESS else self.weight_bytes
        return statistics.median(self.decode[name]) * token_bytes / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, medians and bandwidth shares, for JSON.

        For example, `["median"]["decode"]["2 ranks"]` is in tokens per second; `["bandwidth_share"]["2 ranks"]` ≤ 1.
        """
        tasks = {"prefill": self.prefill, "decode": self.decode}
        medians = {task: {name: statistics.median(speeds[name]) for name in speeds} for task, speeds in tasks.items()}
        shares = {name: self.bandwidth_share(name) for name in self.decode}
        return dataclasses.asdict(self) | {"median": medians, "bandwidth_share": shares}

    def __str__(self) -> str:
        weights = "random weights" if self.random_weights else "its weights"
        lines = [
            f"{self.model}, {weights}, {self.weight_bytes / 1e9:.2f} GB, on {self.ranks} {self.device} ranks",
            f"read bandwidth {self.bandwidth / 1e9:.1f} GB/s: {self.bandwidth / self.weight_bytes:.1f} tok/s at most",
        ]
        if self.scheme:
            lines.append(f"the ranks read {self.held_bytes / 1e9:.2f} GB for each token, with {self.scheme} weights")
        tasks = {f"prefill of {self.prompt} tokens": self.prefill, f"decode of {self.tokens} tokens": self.decode}
        for title, figures in tasks.items():
            lines.append(f"{title} [tokens/s]")
            for name, values in figures.items():
                share = f"   {self.bandwidth_share(name):4.0%} of the bandwidth" if figures is self.decode else ""
                lines.append(f"  {name:<13} median {statistics.median(values):9.1f}   best {max(values):9.1f}{share}")
        return "\n".join(lines)


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
    """Measure the speed of a model on workers and, with `baseline`, alternately in this process on CPU or one GPU.

    Memory must hold two copies of the model, or one copy without `baseline`. If `model` is a `config.json` or a model
    type, the weights are random, and the function seeds torch.

    Args:
        prompt: number of prompt tokens of a prefill round; a decode round has a prompt of 8 tokens.
        rounds: number of measured rounds, after one round to warm up.
        quantize: quantization scheme of the ranks' weights; one process keeps the model's own weights.
        say: function that receives a line of text before each step of the measurement.
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
    kind = target_dtype(False, dtype) or skeleton.dtype
    has_weights = Path(model).is_dir() or not (Path(model).is_file() or model == skeleton.config.model_type)

    def load() -> PreTrainedModel:
        if has_weights:
            return type(skeleton).from_pretrained(model, dtype=kind, revision=revision).eval()
        torch.manual_seed(0)
        return type(skeleton)._from_config(skeleton.config, dtype=torch.float32).to(kind).eval()

    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    try:
        with start_group(num_gpus, device=device) as group:
            say("measuring the read bandwidth")
            speed = read_bandwidth(device, num_gpus)
            say(f"loading {model}")
            cut = parallelize(load(), workers=group, quantize=quantize, progress=False)
            contestants = {f"{num_gpus} ranks": cut}
            if baseline:
                contestants[ONE_PROCESS] = load().to("cuda:0" if device == "cuda" else "cpu")
            read = _tensors_read(skeleton, cut.shard_plan)
            weights = sum(tensor.bytes_whole for tensor in read)
            held = sum(cut.shard_plan.bytes_held(tensor.name) for tensor in read)
            report = Report(model, not has_weights, device, num_gpus, prompt, tokens, weights, speed, quantize, held)
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
    """Measure the memory bandwidth for reads, in bytes per second: the best of 8 sums over a tensor of 512 MiB.

    On a device whose cache is larger than 512 MiB, the result is the cache's bandwidth.
    """
    data = torch.ones(_READ_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(_READ_PASSES):
        start = time.perf_counter()
        data.sum().item()  # `item` waits until the device has computed the sum
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best * (count if device == "cuda" else 1)


def _tensors_read(model: PreTrainedModel, plan: ShardPlan) -> list[TensorPlan]:
    """Return the weights that a decode step reads: all, except an input embedding that is not tied to the head."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is None or model.config.get_text_config().tie_word_embeddings
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    unread = None if tied else names[id(embedding.weight)]
    return [tensor for tensor in plan.stored() if not tensor.is_buffer and tensor.name != unread]


def _prefill(model: Any, prompt: int) -> float:
    """Measure the prompt tokens per second. Short prompts are repeated, because the first call is slower: the CPU
    caches are cold, and the workers sleep.
    """
    seconds = _seconds(model, prompt, 1)
    if seconds < _TURN_SECONDS:
        count = math.ceil(_TURN_SECONDS / seconds)
        seconds = sum(_seconds(model, prompt, 1) for _ in range(count)) / count
    return prompt / seconds


def _decode(model: Any, tokens: int) -> float:
    """Measure the decoded tokens per second after a short prompt, without the time of the prefill."""
    prefill_seconds = _seconds(model, _SHORT_PROMPT, 1)
    return tokens / max(_seconds(model, _SHORT_PROMPT, tokens + 1) - prefill_seconds, 1e-9)


def _seconds(model: Any, prompt: int, tokens: int) -> float:
    """Measure the duration of a greedy `generate` that makes exactly `tokens` new tokens."""
    device = model.device if model.device.type != "meta" else "cpu"
    ids = (torch.arange(prompt, device=device) % (model.config.get_text_config().vocab_size - 4) + 4)[None]
    start = time.perf_counter()
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, pad_token_id=0, **length)
    return time.perf_counter() - start
