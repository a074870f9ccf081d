"""Compares `forecast` for CPU ranks of this machine with measurements: decode steps and memory.

    python -m benchmarks.planner [--shapes 135M 600M gpt2] [--ranks 1 2 4] [--rounds 5] [--json OUT]
    python -m benchmarks.planner --simulate

Each round measures the ranks like `--device here`, and then decodes each shape, so that a slow phase of the machine
affects forecast and measurement. Memory is the peak growth of the fullest rank's process by a model and a long batch.
In this benchmark the process's allocator returns freed memory at once; by default it would keep up to 256 MB.
`--simulate` starts no ranks: it simulates up to 1,000 hosts that fail and restart, and ranks that wait for the slowest
rank.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from benchmarks import measure
from benchmarks.decode import SHAPES
from parallelformers_ng import forecast, plan, start_group
from parallelformers_ng.planner.arrangement import Memory, arrangement, memory_of
from parallelformers_ng.planner.here import as_cluster, probe, running, step_seconds
from parallelformers_ng.planner.observation import Observation, observe

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
_CONFIGS: dict[str, PreTrainedConfig] = {
    name: LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=True, **sizes)
    for name, sizes in {**SHAPES, "tiny": _TINY}.items()
} | {"gpt2": GPT2Config()}
_ANY = Memory(0, 0, 0, 0)
_BAR = 0.2
_BATCH, _LENGTH = 4, 512
"""Sequences, and tokens of each, in the measurement of memory."""
_PROMPT, _TOKENS = 8, 32
"""Tokens of the prompt, and tokens to generate, in the measurement of decode steps."""


def expected(config: PreTrainedConfig, ranks: int) -> tuple[Observation, float]:
    """Observe the fullest rank on `meta`. Returns the observation of a decode step, and the forecast bytes of the rank
    at the end of a long batch."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    shard_plan = plan(model, ranks)
    fullest = max(range(ranks), key=shard_plan.bytes_per_rank.__getitem__)
    long = memory_of(model, shard_plan, observe(model, shard_plan, fullest, _BATCH, _LENGTH), 1, 0.0)
    return observe(model, shard_plan, fullest, 1, _PROMPT + _TOKENS), long.used


_GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}


def peak_bytes(config: PreTrainedConfig, ranks: int) -> float:
    """Return the peak growth of the fullest rank's resident memory by a model and a long batch, in bytes."""
    ids = torch.ones(_BATCH, _LENGTH - 1, dtype=torch.long)
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _GIVES_BACK.items():
            patch.setenv(name, value)
        group = start_group(ranks, device="cpu")
    with group:
        with running(group, LlamaConfig(**_TINY), torch.float32) as model:
            step_seconds(model, _PROMPT, _TOKENS)
        before = [measure.memory(pid)["Rss"] for pid in group.pids]
        for pid in group.pids:
            measure.forget_peak(pid)
        with running(group, config, torch.float32) as model:
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            most = [measure.peak_memory(pid) for pid in group.pids]
    return max(high - low for high, low in zip(most, before, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=_CONFIGS, default=["135M", "600M", "gpt2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulate", action="store_true", help="simulate up to 1,000 hosts")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.simulate:
        return simulate(options.json)
    print(measure.machine())
    figures: dict[str, dict[str, list[float]]] = {}
    for ranks in options.ranks:
        forecasts = {shape: expected(_CONFIGS[shape], ranks) for shape in options.shapes}
        with start_group(1, device="cpu") as single, start_group(ranks, device="cpu") as group:
            for _ in range(options.rounds):
                alone, measured = probe(single, torch.float32), probe(group, torch.float32)
                cluster = as_cluster(measured, alone, ranks, torch.float32)
                for shape in options.shapes:
                    row = figures.setdefault(f"{shape}, {ranks} ranks", {})
                    split = arrangement(cluster, forecasts[shape][0], _ANY, torch.float32, "eager", (ranks, 1, 1), 1)
                    row.setdefault("step", []).append(split.step_seconds)
                    with running(group, _CONFIGS[shape], torch.float32) as model:
                        row.setdefault("step measured", []).append(step_seconds(model, _PROMPT, _TOKENS))
        for shape in options.shapes:
            figures[f"{shape}, {ranks} ranks"] |= {
                "bytes": [forecasts[shape][1]],
                "bytes measured": [peak_bytes(_CONFIGS[shape], ranks)],
            }
    for name, row in figures.items():
        _show(name, row)
    measure.save(options.json, "planner", figures)


def _show(name: str, row: dict[str, list[float]]) -> None:
    words = []
    for what, unit, scale in (("step", "ms", 1e3), ("bytes", "MB", 1e-6)):
        said, real = (statistics.median(row[key]) * scale for key in (what, f"{what} measured"))
        ratio = statistics.median(a / b for a, b in zip(row[what], row[f"{what} measured"], strict=True))
        verdict = "met" if abs(ratio - 1) <= _BAR else "missed"
        words.append(f"{said:8.1f} {unit} forecast, {real:8.1f} measured, {ratio:.2f} x ({verdict})")
    print(f"{name:<18} {'; '.join(words)}")


_LLAMA_405B = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
_JITTER = 0.02
"""Mean additional time of a rank in a step, as a share of the step; exponentially distributed."""
_FAILURES_PER_SECOND = 419 / (54 * 86400 * 16384)
"""Failures of one device per second: 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv:2407.21783,
section 3.3.4)."""
_RESTART_SECONDS = 300
_DAYS = 30


def simulate(json: str | None) -> None:
    """Simulate Llama 3.1 405B on hosts of 8 H100, with 8 sequences on each host. The forecast of two hosts is
    multiplied by the number of replicas. In the simulation ranks wait for the slowest rank, devices fail, and a replica
    restarts after a failure."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**_LLAMA_405B), dtype=torch.bfloat16).eval()
    best = forecast(model, device="h100", hosts=2, batch=16, length=4096).best
    ranks = best.tensor * best.pipeline
    print(f"two hosts: {best}; {'hosts':>5}  {'forecast':>9}  {'simulated':>9}  tokens/s, worst minute")
    draw, figures = np.random.default_rng(0), {}
    # All ranks of a replica wait for each other in each sum.
    waits = 1 + draw.exponential(_JITTER, (20_000, ranks)).max(axis=1).mean()
    for hosts in (2, 10, 100, 1000):
        replicas, minutes = best.replicas * hosts // 2, _DAYS * 24 * 60
        fail = _FAILURES_PER_SECOND * ranks * 60
        started = draw.binomial(replicas, fail, minutes)  # number of replicas that lose a device in each minute
        down = np.convolve(started, np.ones(_RESTART_SECONDS // 60))[:minutes].clip(max=replicas)
        speeds = best.tokens_per_second / best.replicas / waits * (replicas - down)
        expected_speed = best.tokens_per_second * hosts / 2
        figures[hosts] = {
            "forecast": [expected_speed],
            "simulated": [float(speeds.mean())],
            "worst": [float(speeds.min())],
        }
        print(f"{hosts:>5}  {expected_speed:>9.0f}  {speeds.mean():>9.0f}  {speeds.min():>9.0f}", flush=True)
    measure.save(json, "hosts", figures)


if __name__ == "__main__":
    main()
