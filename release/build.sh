#!/usr/bin/env bash
# Builds a source archive and wheels into dist/, and checks them: `make dist` runs it.
# A wheel is built out of the archive, for each CPython 3.11 to 3.14 of this machine; MINORS="11 12" chooses.
#   bash release/build.sh PYTHON    PYTHON has the packages of requirements-dist.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools="$1"
raw="$(mktemp -d)"
trap 'rm -rf "$raw"' EXIT
export PATH="$(cd "$(dirname "$tools")" && pwd):$PATH" # auditwheel looks for patchelf there

interpreter() { # MINOR: a Python that runs; a shim of pyenv exists without one
  for each in "python3.$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"3.$1".*/bin/python3; do
    if "$each" -c 'import ensurepip' 2>/dev/null; then echo "$each"; return; fi
  done
}

rm -rf dist build
"$tools" -m build --sdist --outdir dist .
for minor in ${MINORS:-11 12 13 14}; do
  python="$(interpreter "$minor")"
  if [ -z "$python" ]; then echo "make dist: there is no Python 3.$minor here; no wheel for it"; continue; fi
  "$python" -m venv "$raw/3.$minor"
  "$raw/3.$minor/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$raw" dist/*.tar.gz
done
for wheel in "$raw"/*.whl; do
  # A build without a compiler succeeds, and its wheel is for any machine: not one to publish.
  case "$wheel" in *-any.whl) echo "make dist: $(basename "$wheel") has no kernels; install a C compiler" >&2; exit 1 ;; esac
  "$tools" -m auditwheel repair --wheel-dir dist "$wheel"
done
for wheel in dist/*.whl; do
  names="$("$tools" -m zipfile --list "$wheel")"
  for kernel in kernels/_decode collectives/_kernel live_code/_places; do
    grep -q "parallelformers_ng/$kernel.*\.so" <<<"$names" || { echo "make dist: $wheel has no $kernel" >&2; exit 1; }
  done
  "$tools" -m auditwheel show "$wheel"
done
"$tools" -m twine check --strict dist/*
