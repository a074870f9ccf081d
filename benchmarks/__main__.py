"""Runs the comparisons with other libraries, one after another: `python -m benchmarks [NAME …]`."""

from __future__ import annotations

import argparse
import subprocess
import sys

ALL = ("startup", "round_trip", "generate_cost", "collectives", "kernels", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", choices=[*ALL, []], default=list(ALL), help="names of benchmarks to run; default: all"
    )
    for name in parser.parse_args().names:
        print(f"\n== {name} " + "=" * (70 - len(name)), flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
