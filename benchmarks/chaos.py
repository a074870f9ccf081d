"""Tests the library's promises for faults, at length.

    python -m benchmarks.chaos storm parents --seed 0          some suites, at their full length
    python -m benchmarks.chaos storm --count 200 --seed 3      a part of one, to be added to others by --results
    python -m benchmarks.chaos --report                        the page of all results so far

Everything runs on two CPU ranks with a tiny random model (`devices` on pretended CUDA devices). Each suite prints its
figures beside its bars, and the program fails where one is missed. The same seed gives the same faults in the same
order; their moments depend on the machine.
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

# Parents come first: they are forked, which is for a process without threads.
SUITES = {
    "parents": (chaos_processes.parents, 100, "the parent is killed at any moment from the start of its workers on"),
    "interrupts": (chaos_processes.interrupts, 50, "Ctrl-C at any moment of a call, in a REPL on a pseudo-terminal"),
    "random": (chaos_interrupts.figures, 500, "Ctrl-C at random moments of short calls, one after another"),
    "storm": (chaos_storm.figures, 1000, "requests of 8 threads, a worker killed per 20: idle, prefill, decode, reply"),
    "limit": (chaos_requests.limit, 3, "workers die more often than max_restarts allows"),
    "raises": (chaos_requests.raises, 100, "one rank raises in a block, in the middle of a forward"),
    "stops": (chaos_requests.stops, 20, "a rank is stopped (SIGSTOP) and runs into the deadline"),
    "memory": (chaos_requests.memory, 20, "a worker reaches its memory limit in the middle of a request"),
    "devices": (
        chaos_devices.figures,
        200,
        "on a pretended CUDA device: memory, a sticky error, NCCL, a kill, a late rank",
    ),
    "inputs": (chaos_inputs.figures, 1000, "invalid requests; the whole model says what each should give"),
    "threads": (chaos_requests.threads, 3200, "greedy and seeded calls of 32 threads"),
    "cycles": (chaos_processes.cycles, 100, "parallelize and deparallelize, with workers of their own each time"),
    "starts": (chaos_processes.starts, 50, "8 groups of 2 ranks started at once, over gloo"),
    "http": (chaos_http.hostile, 10_000, "hostile requests to a server, from 8 clients beside 2 honest ones"),
    "sound": (chaos_http.hostile_sound, 1000, "hostile sound files and forms to a server that transcribes"),
    "clients": (chaos_http.clients, 200, "clients of a server go at random moments"),
    "nodes": (chaos_hosts.nodes, 20, "a Ray node is killed in the middle of a request (where Ray is installed)"),
    "served": (chaos_http.kills, 20, "a worker of a server is killed under load; then SIGTERM with 8 in flight"),
}


def main() -> None:
    """Run the suites named on the command line, by default all."""
    epilog = "suites:\n" + "\n".join(f"  {name:<11}{count:>7} x  {what}" for name, (_, count, what) in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", metavar="suite", help="which; all where none is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="how many times, instead of each suite's own number")
    parser.add_argument("--results", type=Path, default=RESULTS / "chaos.json", help="the file to add the figures to")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page of all results beside it")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    if options.report:
        about = {name: (count, what) for name, (_, count, what) in SUITES.items()}
        options.results.with_suffix(".md").write_text(page(recall(options.results), about))
        return
    options.results.parent.mkdir(exist_ok=True)
    chosen = options.suites or [name for name in SUITES if name != "nodes" or find_spec("ray")]
    kept = [_run(name, options) for name in SUITES if name in chosen]
    sys.exit(not all(kept))


def _run(name: str, options: argparse.Namespace) -> bool:
    """Run one suite. Returns whether it kept to its bars."""
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
