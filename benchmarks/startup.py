"""How long `parallelize` takes on a tiny model, beside a bare import of torch and the model's class.

python -m benchmarks.startup [--rounds 5] [--json OUT]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import measure

_IMPORT = "import time; t = time.perf_counter(); import torch; from transformers import LlamaForCausalLM; "
_TINY = (
    "from transformers import LlamaConfig; from parallelformers_ng import parallelize; "
    "m = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
    "num_attention_heads=4, num_key_value_heads=2)); t = time.perf_counter(); "
    "parallelize(m, 2, workers={'device': 'cpu'}); "
)
_SHOW = "print(time.perf_counter() - t)"


def _run(code: str) -> float:
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    figures = measure.interleave(
        {"bare import": lambda: _run(_IMPORT + _SHOW), "parallelize, 2 workers": lambda: _run(_IMPORT + _TINY + _SHOW)},
        options.rounds,
    )
    print(measure.machine())
    measure.report("start of a tiny model", "s", figures, against="bare import")
    measure.save(options.json, "startup", figures)


if __name__ == "__main__":
    main()
