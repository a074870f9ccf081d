"""Plans every model type's real default configuration, and reports the sharded bytes and their balance.

    python -m benchmarks.full_size full_size.json [--types llama,bert] [--world-sizes 2,8]

The models are planned on `meta`, without weights, one after another in a separate process. If the file exists, only
missing types are planned. `python -m benchmarks.zoo --full-size full_size.json` adds the figures to the table
COVERAGE.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from parallelformers_ng.sharding.wording import human_bytes

LARGE = 300_000_000
"""Number of parameters above which the limits ENOUGH and EVEN hold."""
ENOUGH, EVEN, QUICK = 0.8, 1.2, 30.0
"""Smallest share of sharded bytes, largest share on the fullest rank (an even share is 1), longest time in seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the types that the file lacks, write the file, and return 1 if a type is refused."""
    from benchmarks.zoo import Worker
    from tests.zoo.catalogue import model_classes

    options = _parser().parse_args(arguments)
    results = load(options.json)
    types = options.types.split(",") if options.types else sorted(set(model_classes()) - set(results))
    worker = Worker(options.world_sizes, "full")
    for name in types:
        rows, problem = worker.judge(name, options.timeout)
        row = rows[0] if rows else {"model_type": name, "status": "refused", "reason": problem}
        results[name] = row
        Path(options.json).write_text(json.dumps(list(results.values()), indent=1) + "\n")
        print(f"{row['status']:<8} {name}  {cell(row)} {row.get('reason', '')}", flush=True)
    worker.close()
    print(summary(results.values()))
    return int(any(row["status"] == "refused" for row in results.values()))


def load(path: str | None) -> dict[str, dict[str, Any]]:
    """Return model type → row, from a file of this benchmark; an empty dict if the file does not exist."""
    if not path or not Path(path).exists():
        return {}
    return {row["model_type"]: row for row in json.loads(Path(path).read_text())}


def cell(row: dict[str, Any] | None) -> str:
    """Format one type's figures for the table: `27.5 GB: 100 / 100% cut, fullest 1.00 / 1.01`."""
    if row is None or row["status"] != "planned":
        return ""
    cut = " / ".join(f"{share:.0%}" for share in row["cut"].values())
    fullest = " / ".join(f"{times:.2f}" for times in row["fullest"].values())
    return f"{human_bytes(row['bytes'])}: {cut} cut, fullest {fullest}"


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Return a summary as items of a Markdown list; it names each type that misses a limit."""
    planned = [row for row in rows if row["status"] != "skipped"]
    if not planned:
        return ""
    refused = [row["model_type"] for row in planned if row["status"] == "refused"]
    planned = [row for row in planned if row["status"] == "planned"]
    large = [row for row in planned if row["parameters"] > LARGE]
    missed = [row for row in large if min(row["cut"].values()) < ENOUGH or max(row["fullest"].values()) > EVEN]
    slowest = max(planned, key=lambda row: max(row["seconds"].values()))
    sizes = " and ".join(slowest["cut"])
    names = "".join(f"; {row['model_type']} ({cell(row)}; whole: {', '.join(row['whole'])})" for row in missed)
    return (
        f"\n- *full size* is the real default configuration, planned for {sizes} ranks: bytes, share of **all** bytes"
        " that is cut, bytes of the fullest rank (an even share being 1)"
        f"\n- of {len(large)} types with more than {LARGE // 10**6} M parameters, {len(large) - len(missed)} have"
        f" at least {ENOUGH:.0%} of all bytes cut and at most {EVEN} even shares on the fullest rank{names}"
        f"\n- refused: {', '.join(refused) or 'none'}; the slowest plan is that of {slowest['model_type']}:"
        f" {max(slowest['seconds'].values()):.0f} s of processor time"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.full_size", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "json", metavar="FILE", help="output file; types that are already in the file are not planned again"
    )
    parser.add_argument("--types", help="comma-separated model types to plan again (default: all that the file lacks)")
    parser.add_argument("--world-sizes", default="2,8", help="comma-separated numbers of ranks (default: 2,8)")
    parser.add_argument("--timeout", type=float, default=120.0, help="processor seconds for one type (default: 120)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
