"""Tests the library's promises about faults, with many random faults.

    python -m benchmarks.chaos storm parents --seed 0          run two suites at their full length
    python -m benchmarks.chaos storm --count 200 --seed 3      run a part of a suite; --results adds up all runs
    python -m benchmarks.chaos --report                        write the page of all results so far

All suites run on two CPU ranks with a tiny random model; `devices` runs on pretended CUDA devices. Each suite prints
its figures beside their limits. The program fails if a figure is over its limit. The same seed gives the same faults in
the same order; the moments of the faults depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import (
    chaos_devices,
    chaos_hosts,
    chaos_http,
    chaos_inputs,
    chaos_interrupts,
    chaos_processes,
    chaos_requests,
    chaos_storm,
)
from benchmarks.chaos_figures import Run, lines, page, recall, remember
from benchmarks.measure import machine

RESULTS = Path(__file__).parent / "results"

# Parents come first: only a process without threads can fork safely.
SUITES = {
    "parents": (
        chaos_processes.parents,
        100,
        "the parent is killed at a random moment during or after the start of its workers",
    ),
    "interrupts": (
        chaos_processes.interrupts,
        50,
        "Ctrl-C at a random moment of a call, in a REPL on a pseudo-terminal",
    ),
    "random": (chaos_interrupts.figures, 500, "Ctrl-C at random moments of short calls, one after another"),
    "storm": (
        chaos_storm.figures,
        1000,
        "requests of 8 threads; every 20 requests a worker is killed: idle, prefill, decode or reply",
    ),
    "limit": (chaos_requests.limit, 3, "workers die more often than max_restarts allows"),
    "raises": (chaos_requests.raises, 100, "one rank raises an exception in a block, during a forward"),
    "stops": (chaos_requests.stops, 20, "a rank is stopped (SIGSTOP) until the request reaches its deadline"),
    "memory": (chaos_requests.memory, 20, "a worker reaches its memory limit during a request"),
    "devices": (
        chaos_devices.figures,
        200,
        "faults on a pretended CUDA device: memory, a sticky error, NCCL, a kill, a late rank",
    ),
    "inputs": (chaos_inputs.figures, 1000, "invalid requests; answers are compared with answers of the whole model"),
    "threads": (chaos_requests.threads, 3200, "greedy and seeded calls of 32 threads"),
    "cycles": (chaos_processes.cycles, 100, "parallelize and deparallelize, with new workers each time"),
    "starts": (chaos_processes.starts, 50, "8 groups of 2 ranks started at once, over gloo"),
    "http": (
        chaos_http.hostile,
        10_000,
        "hostile requests to a server from 8 clients, and honest requests from 2 clients",
    ),
    "sound": (chaos_http.hostile_sound, 1000, "hostile sound files and forms, to a server that transcribes"),
    "clients": (chaos_http.clients, 200, "clients of a server disconnect at random moments"),
    "nodes": (chaos_hosts.nodes, 20, "a Ray node is killed during a request (if Ray is installed)"),
    "served": (chaos_http.kills, 20, "a worker of a server is killed under load; then SIGTERM with 8 running requests"),
}


def main() -> None:
    """Run the suites of the command line; all suites by default."""
    epilog = "suites:\n" + "\n".join(f"  {name:<11}{count:>7} x  {what}" for name, (_, count, what) in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", metavar="suite", help="suites to run (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="number of repetitions (default: the number in the list of suites)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "chaos.json", help="file to which the figures are added"
    )
    parser.add_argument("--report", action="store_true", help="run no suite; write the page of all results")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; known suites: {', '.join(SUITES)}")
    if options.report:
        about = {name: (count, what) for name, (_, count, what) in SUITES.items()}
        options.results.with_suffix(".md").write_text(page(recall(options.results), about))
        return
    options.results.parent.mkdir(exist_ok=True)
    chosen = options.suites or [name for name in SUITES if name != "nodes" or find_spec("ray")]
    within_limits = [_run(name, options) for name in SUITES if name in chosen]
    sys.exit(not all(within_limits))


def _run(name: str, options: argparse.Namespace) -> bool:
    """Run one suite, and return whether all figures are within their limits."""
    suite, standard_count, what = SUITES[name]
    count = options.count or standard_count
    torch.set_num_threads(1)
    print(f"{name}: {count} x {what}   {machine()}", flush=True)
    begin = time.monotonic()
    figures = suite(count, options.seed)
    run = Run.of(name, count, options.seed, time.monotonic() - begin, figures)
    print(f"  {f'{run.seconds:.0f} s':<46}{'measured':>10}{'at most':>10}", *lines(figures), sep="\n", flush=True)
    remember(run, options.results)
    return all(figure.holds for figure in figures)


if __name__ == "__main__":
    main()
