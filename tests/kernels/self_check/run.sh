#!/usr/bin/env bash
# Compiles the C kernels and compares them with plain loops, natively or for another processor:
#   bash tests/kernels/self_check/run.sh
#   CC=aarch64-linux-gnu-gcc bash tests/kernels/self_check/run.sh qemu-aarch64 -L /usr/aarch64-linux-gnu
# The arguments are a command that runs the programs. The Python headers are those of $PYTHON; the programs call no Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
headers=$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))')
"${CC:-cc}" -fsyntax-only -std=gnu11 -I "$headers" ../../../parallelformers_ng/kernels/_decode.c
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT

for name in decode sums; do
  "${CC:-cc}" ${CFLAGS:--O3} -std=gnu11 -ffp-contract=fast -Wall -Wextra -Wno-unused-function -Wno-unused-const-variable -Werror \
    -ffunction-sections -fdata-sections -I "$headers" "$name.c" -o "$built/$name" -Wl,--gc-sections -lm
  "$@" "$built/$name"
done
