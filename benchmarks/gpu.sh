#!/usr/bin/env bash
# All that needs a CUDA device, in parts of at most 270 s. Without PART: core and ranks, one after another.
#   core      tests of one rank on the device; speed, kernels, callers, restart, profile
#   ranks     tests of several ranks that share the device over NCCL: tests/devices/one_card
#   policies  each written policy once, on two ranks that share the device; goes on where the last report stopped
#   lowbit    speed and steps with quantized weights
#   crowd     many callers of the large shape
#   alone     one rank of 1, 2, 4 and 8 of the large shape, without its sums
# Each part leaves a report of what was said, gpu-PART.txt, and the figures as they come, gpu-PART.json and gpu-PART.md.
# Each step has a time limit of its own; a step that reaches it is interrupted, so that its traceback tells what it
# waited for. Installs nothing but what lies in $WHEELS, if that is set, and that beside the interpreter's own packages.
# It needs what the package needs, pytest, psutil, and for ranks peft.
# It fails if a step does, if a step was not begun, or if torch cannot use the device. With WITHOUT_DEVICE=succeed it
# says that there is no device, and succeeds. With PRETEND=1 everything runs on the stand-in of tests/pretend_cuda, with
# tiny shapes and an hour for each part: this shows whether the files and imports of a part are there.
#   PART="core ranks" PYTHON=python3 WHEELS=dist SECONDS_OF_PART=270 SHAPES="8B 8B-8-layers" bash benchmarks/gpu.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
known="core ranks policies lowbit crowd alone"
read -ra parts <<<"${PART:-core ranks}"
for part in "${parts[@]}"; do
  if [[ " $known " != *" $part "* ]]; then
    echo "make gpu: there is no part '$part'; PART takes ${known// /, }" >&2
    exit 2
  fi
done
read -ra python <<<"${PYTHON:-python3}"
shapes="${SHAPES:-8B 8B-8-layers}" seconds="${SECONDS_OF_PART:-270}" out="${1:-benchmarks/results/gpu.txt}"
if [ -n "${PRETEND:-}" ]; then
  python+=(-m tests.pretend_cuda.image)
  shapes=tiny seconds="${SECONDS_OF_PART:-3600}" out="${1:-${TMPDIR:-/tmp}/pretended-gpu/gpu.txt}"
elif [ "${WITHOUT_DEVICE:-}" = succeed ] && ! nvidia-smi -L 2>&1 | grep -q '^GPU' \
  && ! "${python[@]}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  version="$("${python[@]}" -c 'import torch; print(torch.__version__)')"
  echo "make gpu: torch $version sees no CUDA device; nothing to check"
  exit 0
fi
read -ra shapes <<<"$shapes"
large="${shapes[0]}" small="${shapes[-1]}"
mkdir -p "$(dirname "$out")"
# Packages of some GPU images have no bytecode beside them, and compiling it takes each process ten seconds.
temporary="$(mktemp -d)"
trap 'rm -rf "$temporary"' EXIT
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$temporary/bytecode}"
[ -z "${WHEELS:-}" ] || export PYTHONPATH="$temporary/site${PYTHONPATH:+:$PYTHONPATH}"
export PARALLELFORMERS_TESTS_NEED_GPU=1 # a test that finds no device fails, and is not skipped

step() { # NAME SECONDS COMMAND…
  local name="$1" limit="$2" left=$((end - SECONDS))
  shift 2
  code=1
  if [ "$left" -lt "$limit" ] || [ -n "${PRETEND:-}" ]; then limit="$left"; fi
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

tests() { # SECONDS FILE…: those with the mark, and no others: what they import is less than what all import
  step "tests" "$1" "${python[@]}" -m pytest -q -rs --durations=10 -m gpu "${@:2}"
}

measurements() { # the rest of the time
  local left=$((end - SECONDS - 5)) # the program ends by itself before its limit
  step "measurements" "$((left + 5))" "${python[@]}" -m benchmarks.gpu_all --set "$part" --large "$large" \
    --small "$small" --seconds "$left" --json "$results"
}

prepare() {
  [ -n "${PRETEND:-}" ] \
    || step "the device" 20 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  if [ -n "${WHEELS:-}" ]; then
    step "wheels" 45 "${python[@]}" -m pip install --quiet --no-index --no-deps --target "$temporary/site" "$WHEELS"/*.whl
    # The tree comes first where both have the package, and what was compiled is in the wheel alone.
    (cd "$temporary/site" && find parallelformers_ng -name '*.so' 2>/dev/null) | while read -r built; do
      cp "$temporary/site/$built" "$built"
    done
  fi
  step "versions" 30 "${python[@]}" -c 'import torch, transformers, sys
print("torch", torch.__version__, "CUDA", torch.version.cuda, "transformers", transformers.__version__)
torch.cuda.is_available() or sys.exit("torch can use no CUDA device: the driver is too old for it, or it is a build for CPU")'
  [ "$code" -eq 0 ] || exit 1 # nothing else can run
  touch "$temporary/prepared"
}

run() {
  [ -e "$temporary/prepared" ] || prepare
  mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | grep -v '/one_card/')
  case "$part" in
    core)
      tests 120 "${files[@]}"
      measurements
      ;;
    ranks) tests "$seconds" tests/devices/one_card ;;
    policies)
      step "policies" "$seconds" "${python[@]}" -m benchmarks.gpu_policies --seconds $((end - SECONDS - 30)) \
        --json "$results"
      ;;
    *) measurements ;;
  esac
}

failed=0
for part in "${parts[@]}"; do
  report="${out%.txt}-$part.txt"
  results="${report%.txt}.json"
  # Figures of another run are perhaps of another card. The part policies goes on with its own.
  [ "$part" = policies ] || rm -f "$results" "${results%.json}.md"
  end=$((SECONDS + seconds)) status=0
  {
    echo "=== $part"
    begun=$SECONDS
    run
    echo "=== $part: $((SECONDS - begun)) s, status $status"
    exit "$status" # of the braces, which run in a process of their own
  } 2>&1 | tee "$report" || failed=1
  [ -e "$temporary/prepared" ] || break
done
exit "$failed"
