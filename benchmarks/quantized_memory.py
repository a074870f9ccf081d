"""Measures memory while ranks read and quantize a checkpoint: each rank's anonymous memory, at the peak and at the end,
compared with the rank's shard in bf16, and the caller's anonymous memory.

    python -m benchmarks.quantized_memory [--size 2GB] [--ranks 2] [--quantize int8] [--json OUT]

With int8, the program exits with 1 in three cases. A rank ends with more than 0.55 of its shard in bf16. A rank's peak
is above that limit plus the largest tensor. The caller has more than 300 MB. In a small model other memory has a large
share, so the limits are for 2 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from benchmarks.loading_ways import Memory
from parallelformers_ng import parallelize, start_group

SIZES: dict[str, dict[str, Any]] = {
    "270MB": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "vocab_size": 4096,
              "num_attention_heads": 16, "num_key_value_heads": 4},
    "2GB": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000,
            "num_attention_heads": 32, "num_key_value_heads": 4},
}  # fmt: skip
MAX_OF_SHARD, MAX_OF_CALLER = 0.55, 300e6


def write(directory: str, size: str) -> None:
    """Write a checkpoint in bf16 with random weights; embedding and head are not tied."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[size])).to(torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(directory)


def measured(directory: str, ranks: int, quantize: dict[str, Any]) -> dict[str, Any]:
    """Return sizes in bytes: bf16 shards, quantized shards, the largest tensor, and anonymous memory."""
    with start_group(ranks, device="cpu") as group:
        memory = Memory([os.getpid(), *group.pids], interval=0.01)
        model = parallelize(directory, workers=group, quantize=quantize, batching=False, progress=False)
        model(torch.arange(8)[None])
        bytes_now, plan = memory.now(), model.shard_plan
        peaks = memory.stop()["rank_anonymous"]
        plain = [sum(tensor.bytes_on(rank) for tensor in plan.stored()) for rank in range(ranks)]
        return {
            "shard in bf16": plain,
            "shard": plan.bytes_per_rank,
            "at the end": [bytes_now[pid] - memory.before[pid] for pid in group.pids],
            "at the peak": peaks,
            "largest tensor": max(tensor.bytes_whole for tensor in plan.stored()),
            "caller": measure.memory(os.getpid())["Anonymous"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="270MB", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quantize", default="int8", metavar="SCHEME")
    parser.add_argument("--json")
    parser.add_argument("--write", metavar="DIRECTORY", help="only write the checkpoint to this directory")
    options = parser.parse_args()
    if options.write is not None:
        write(options.write, options.size)
        return
    print(measure.machine())
    with tempfile.TemporaryDirectory() as folder:
        module = ["-m", "benchmarks.quantized_memory", "--size", options.size, "--write", folder]
        subprocess.run([sys.executable, *module], check=True)
        figures = measured(folder, options.ranks, {"scheme": options.quantize, "embeddings": True})
    for name, value in figures.items():
        print(
            f"{name:<16}", " ".join(f"{size / 1e6:9.1f} MB" for size in (value if isinstance(value, list) else [value]))
        )
    measure.save(options.json, f"quantized memory {options.size}", figures)
    shares = [end / whole for end, whole in zip(figures["at the end"], figures["shard in bf16"], strict=True)]
    print("at the end, against bf16:", " ".join(f"{share:.3f}" for share in shares))
    limits = [MAX_OF_SHARD * whole + figures["largest tensor"] for whole in figures["shard in bf16"]]
    within = all(peak <= limit for peak, limit in zip(figures["at the peak"], limits, strict=True))
    if options.quantize == "int8" and (max(shares) > MAX_OF_SHARD or not within or figures["caller"] > MAX_OF_CALLER):
        sys.exit("a rank or the caller uses more memory than its limit")


if __name__ == "__main__":
    main()
