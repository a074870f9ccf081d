#!/usr/bin/env bash
# All that needs a CUDA device, in one call: the GPU tests, then the GPU benchmark. Leaves one report.
#   PYTHON=python3 bash benchmarks/gpu.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out="${1:-benchmarks/results/gpu.txt}"
mkdir -p "$(dirname "$out")"
status=0
{
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || status=1
  "$python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)' \
    || status=1
  "$python" -m pytest -q -m gpu tests || status=1
  "$python" -m benchmarks.gpu --json "${out%.txt}.json" || status=1
  exit "$status"  # of the braces, which run in a process of their own
} 2>&1 | tee "$out"
