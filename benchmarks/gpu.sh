#!/usr/bin/env bash
# All that needs a CUDA device, in one sitting of nine minutes: tests, and the measurements of `benchmarks.gpu_all`.
# Leaves a report of what was said, gpu.txt, and the figures as they come, gpu.json and gpu.md. Each step has a time
# limit of its own; a step that reaches it is interrupted, so that its traceback tells what it waited for. Installs
# nothing but what lies in $WHEELS, if that is set, and that beside the interpreter's own packages. It needs what the
# package needs, and pytest.
# It fails if a step does, if a step was not begun, or if torch cannot use the device.
#   PYTHON=python3 WHEELS=dist SECONDS_IN_ALL=540 SHAPES="8B 8B-8-layers" bash benchmarks/gpu.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python="${PYTHON:-python3}"
out="${1:-benchmarks/results/gpu.txt}"
results="${out%.txt}.json"
end=$((SECONDS + ${SECONDS_IN_ALL:-540}))
status=0
read -ra shapes <<<"${SHAPES:-8B 8B-8-layers}"
large="${shapes[0]}" small="${shapes[-1]}"
mkdir -p "$(dirname "$out")"
rm -f "$results" "${results%.json}.md" # figures of another run, perhaps of another card
# Packages of some GPU images have no bytecode beside them, and compiling it takes each process ten seconds.
bytecode="$(mktemp -d)"
trap 'rm -rf "$bytecode"' EXIT
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$bytecode}"
export PARALLELFORMERS_TESTS_NEED_GPU=1 # a test that finds no device fails, and is not skipped

step() { # NAME SECONDS COMMAND…
  local name="$1" limit="$2" left=$((end - SECONDS))
  shift 2
  code=1
  [ "$left" -lt "$limit" ] && limit="$left"
  if [ "$limit" -le 0 ]; then
    echo "== $name: not begun, the time is up"
    status=1
    return
  fi
  echo "== $name"
  timeout --signal=INT --kill-after=5 "$limit" "$@"
  code=$?
  case "$code" in
    0) ;;
    124 | 137) echo "== $name: ended after its $limit s" ;;
    *) echo "== $name: failed with status $code" ;;
  esac
  [ "$code" -eq 0 ] || status=1
}

{
  step "the device" 20 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  if [ -n "${WHEELS:-}" ]; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    step "wheels" 45 "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$WHEELS"/*.whl
    # The tree comes first where both have the package, and what was compiled is in the wheel alone.
    (cd "$site" && find parallelformers_ng -name '*.so' 2>/dev/null) | while read -r built; do cp "$site/$built" "$built"; done
  fi
  step "versions" 30 "$python" -c 'import torch, transformers, sys
print("torch", torch.__version__, "CUDA", torch.version.cuda, "transformers", transformers.__version__)
torch.cuda.is_available() or sys.exit("torch can use no CUDA device: the driver is too old for it, or it is a build for CPU")'
  [ "$code" -eq 0 ] || exit 1 # nothing else can run
  # Those with the mark, and no others: what they import is less than what all import.
  mapfile -t tests < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
  step "tests" 150 "$python" -m pytest -q -rs --durations=5 -m gpu "${tests[@]}"
  left=$((end - SECONDS - 5)) # the program ends by itself before its limit
  step "measurements" "$((left + 5))" "$python" -m benchmarks.gpu_all --large "$large" --small "$small" \
    --seconds "$left" --json "$results"
  exit "$status" # of the braces, which run in a process of their own
} 2>&1 | tee "$out"
