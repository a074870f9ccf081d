"""Runs a rank alone with small sizes, in a process of its own: a rank changes functions of torch and transformers.

python -m tests.helpers.small_rank_alone measure JSON
python -m tests.helpers.small_rank_alone shapes          prints the shapes of a layer's weights, and bytes, as JSON
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from benchmarks import gpu, gpu_alone, gpu_parts


def measure(results: str) -> None:
    gpu_alone.ROWS, gpu_alone.PROMPTS, gpu_alone.TOKENS = (1, 2), (5,), 6
    gpu.copy_bandwidth = lambda device: 1e9
    sys.argv = ["gpu_parts", "alone", "--shape", "tiny", "--device", "cpu", "--json", results]
    gpu_parts.main()


def shapes() -> None:
    options: Any = SimpleNamespace(shape="tiny", device="cpu")
    with gpu_alone.rank_alone(options, 2, "bf16") as (rank, nbytes):
        layer, embedding = rank.model.model.layers[0], rank.model.model.embed_tokens.weight
        nbytes_held = sum(each.nbytes for each in (*rank.model.parameters(), *rank.model.buffers()))
        rank_part = {"q": layer.self_attn.q_proj.weight.shape, "down": layer.mlp.down_proj.weight.shape}
        print(json.dumps(rank_part | {"said": nbytes, "held": nbytes_held - embedding.nbytes}))


if __name__ == "__main__":
    measure(sys.argv[2]) if sys.argv[1] == "measure" else shapes()
