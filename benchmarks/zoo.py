"""Judges every model type of transformers on a tiny random model: sharded and whole outputs must match.

    python -m benchmarks.zoo [--world-sizes 2,4] [--types llama,bert] [--json zoo.json] [--table COVERAGE.md] [--varied]

Ranks are threads and models are tiny, so that a run takes minutes. Each worker process judges one type after another.
If a worker process crashes or hangs, it is replaced, and the type's verdict says so. With `--varied`, models have other
sizes than the twins that prove their policies.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import full_size
from tests.zoo.catalogue import model_classes

ENOUGH = 0.8
_STATES = ("equal", "wrong", "hanging", "refused", "skipped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the zoo, write the table, and return 1 if a type is wrong or hangs."""
    options = _parser().parse_args(arguments)
    classes = model_classes()
    types = options.types.split(",") if options.types else sorted(classes)
    unknown = sorted(set(types) - set(classes))
    if unknown:
        print(f"no such model types: {', '.join(unknown)}", file=sys.stderr)
        return 2
    part, _, parts = options.part.partition("/")
    types = types[int(part) - 1 :: int(parts)]
    sizes = full_size.load(options.full_size)
    earlier: list[dict[str, Any]] = []
    if options.json and (options.types or options.part != "1/1" or options.resume) and Path(options.json).exists():
        earlier = json.loads(Path(options.json).read_text())
        if options.resume:
            judged = {verdict["model_type"] for verdict in earlier}
            types = [name for name in types if name not in judged]
        earlier = [verdict for verdict in earlier if verdict["model_type"] not in types]

    def save(verdicts: list[dict[str, Any]]) -> None:
        """Write the files after every type, so that a stopped run keeps its verdicts."""
        together = sorted(earlier + verdicts, key=_order)
        if options.json:
            Path(options.json).write_text(json.dumps(together, indent=1) + "\n")
        if options.table:
            Path(options.table).write_text(coverage(together, len(classes), sizes))

    finished = run(
        types, options.world_sizes, options.workers, options.timeout, save, options.seconds, varied=options.varied
    )
    verdicts = sorted(earlier + finished, key=_order)
    save(finished)
    print(summary(verdicts))
    return int(any(verdict["status"] in ("wrong", "hanging") for verdict in verdicts))


def run(
    types: Sequence[str],
    world_sizes: str,
    workers: int,
    timeout: float,
    save: Callable[[list[dict[str, Any]]], None],
    seconds: float = float("inf"),
    varied: bool = False,
) -> list[dict[str, Any]]:
    """Judge `types` in worker processes.

    Args:
        types: model types.
        world_sizes: comma-separated numbers of ranks.
        workers: number of processes.
        timeout: seconds of processor time that one type may take.
        save: called with all verdicts so far, after each type.
        seconds: time after which no further type is started.
        varied: whether models have other sizes than the twins that prove policies.
    """
    lock = threading.Lock()
    end = time.monotonic() + seconds
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in types:
        waiting.put(name)
    verdicts: list[dict[str, Any]] = []

    def serve() -> None:
        worker = Worker(world_sizes, *(["varied"] if varied else []))
        while not waiting.empty() and time.monotonic() < end:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            answer, problem = worker.judge(name, timeout)
            if problem:
                status = "hanging" if problem.startswith("no answer") else "wrong"
                answer = [
                    {"model_type": name, "model_class": "", "world_size": int(size), "status": status,
                     "reason": problem, "source": "", "share": 0.0, "compared": "", "seconds": timeout}
                    for size in world_sizes.split(",")
                ]  # fmt: skip
            with lock:
                verdicts.extend(answer)
                save(verdicts)
            for verdict in answer:
                line = f"{verdict['status']:<8} {verdict['model_type']} × {verdict['world_size']}"
                print(f"{line}  {verdict['share']:.0%} {verdict['source']} {verdict['reason'][:150]}", flush=True)
        worker.close()

    threads = [threading.Thread(target=serve) for _ in range(min(workers, len(types)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


def _order(verdict: dict[str, Any]) -> tuple[str, int]:
    return verdict["model_type"], verdict["world_size"]


class Worker:
    """A process that judges one type after another.

    Args:
        arguments: arguments of `tests.zoo.worker`.
    """

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def judge(self, name: str, timeout: float) -> tuple[list[dict[str, Any]], str]:
        """Return the verdicts, and the problem of the worker process itself, or ""."""
        fresh = self.process is None
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.zoo.worker", *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n".encode())
        # The limit is processor time, so that a busy machine causes no timeout; on the clock it is ten times as long.
        allowed = _cpu_seconds(self.process.pid) + timeout + (30 if fresh else 0)
        deadline = time.monotonic() + 10 * timeout
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], 1.0)[0]:
                if _cpu_seconds(self.process.pid) < allowed and time.monotonic() < deadline:
                    continue
                self.close()
                return [], f"no answer within {timeout:.0f} s of processor time"
            piece = self.process.stdout.read(65536)
            if not piece:
                code = self.process.wait()
                self.process = None
                return [], f"its process ended with {code}"
            line += piece
        verdict = json.loads(line)
        return verdict, "" if verdict else "its worker raised"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process, user and system (`proc(5)`, fields 14 and 15 of `stat`)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the counts for each world size, in words."""
    lines = []
    for size in sorted({verdict["world_size"] for verdict in verdicts}):
        mine = [verdict for verdict in verdicts if verdict["world_size"] == size]
        count = Counter(verdict["status"] for verdict in mine)
        judged = len(mine) - count["skipped"]
        good = sum(verdict["status"] == "equal" and verdict["share"] >= ENOUGH for verdict in mine)
        states = ", ".join(f"{count[state]} {state}" for state in _STATES if count[state])
        lines.append(
            f"{size} ranks: of {judged} model types that run whole, {good} ({good / max(1, judged):.1%}) are equal with"
            f" at least {ENOUGH:.0%} of their cuttable bytes cut; {states}"
        )
    return "\n".join(lines)


def coverage(verdicts: Sequence[dict[str, Any]], known: int, full: dict[str, dict[str, Any]]) -> str:
    """Return the coverage table as Markdown.

    Args:
        verdicts: a verdict for each model type and world size.
        known: number of all model types.
        full: model type → its default configuration, planned (`full_size.py`).
    """
    types: dict[str, dict[int, dict[str, Any]]] = {}
    for verdict in verdicts:
        types.setdefault(verdict["model_type"], {})[verdict["world_size"]] = verdict
    sizes = sorted({verdict["world_size"] for verdict in verdicts})
    counts = "".join(f" {size} ranks |" for size in sizes)
    rows = [_row(name, types[name], sizes, full_size.cell(full.get(name))) for name in sorted(types)]
    return (
        "# Coverage\n\nGenerated by `make zoo`; not to be edited. A tiny random model of every model type, cut and"
        f" compared with itself whole (transformers {transformers.__version__}, torch {torch.__version__}). A"
        " percentage is the share of its cuttable bytes that are cut; *layers* means that some of its layers, which no"
        " known inputs reach, were compared one by one; *skipped* means that it does not run whole either.\n\n"
        f"- {len(types)} of {known} model types have been judged\n"
        + "\n".join(f"- {line}" for line in summary(verdicts).splitlines())
        + full_size.summary(full.values())
        + f"\n\n| model type | class | policy |{counts} compared | full size | reason |\n"
        + f"| --- | --- | --- |{' --- |' * len(sizes)} --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    )


def _row(name: str, verdicts: dict[int, dict[str, Any]], sizes: Sequence[int], full: str) -> str:
    cells = []
    for size in sizes:
        status, share = (verdicts[size]["status"], verdicts[size]["share"]) if size in verdicts else ("", 0.0)
        cells.append(f"{share:.0%}" if status == "equal" else status)
    first = verdicts[min(verdicts)]
    compared = max((verdict["compared"] for verdict in verdicts.values()), key=len)
    reason = next((verdict["reason"] for verdict in verdicts.values() if verdict["reason"]), "")
    shown = [name, first["model_class"], first["source"], *cells, compared, full, reason.replace("|", "/")[:160]]
    return f"| {' | '.join(shown)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--types", help="comma-separated model types (default: all)")
    parser.add_argument("--varied", action="store_true", help="use models of other sizes than the proofs")
    parser.add_argument("--part", default="1/1", help="the i-th of n parts of the types (default: 1/1)")
    parser.add_argument("--world-sizes", default="2,4", help="comma-separated numbers of ranks (default: 2,4)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--timeout", type=float, default=60.0, help="processor seconds for one type (default: 60)")
    parser.add_argument("--json", help="output file of the verdicts; a run of some types adds to the file")
    parser.add_argument("--full-size", help="file of `python -m benchmarks.full_size`, added to the table")
    parser.add_argument("--resume", action="store_true", help="skip types that are already in the --json file")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further type after these seconds")
    parser.add_argument("--table", default="COVERAGE.md", help="output file of the table ('' writes no table)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
