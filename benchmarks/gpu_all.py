"""Runs all measurements of `make gpu` in one process: imports and the fork server of the workers are paid for once.

    python -m benchmarks.gpu_all [PART …] [--set core] [--large 8B] [--small 8B-8-layers] [--device cuda] [--json OUT]

Each part has a time limit; a part that reaches it is interrupted, with a traceback of what it waited for, and the next
one begins. The program fails if a part does.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import gpu, gpu_parts

OURS = "parallelformers_ng, captured steps"
MAIN = [OURS, "transformers, eager", f"{OURS}, int8"]
LOW_BITS = [f"{OURS}, int8", f"{OURS}, int4"]
OTHERS = [OURS, "transformers, eager", "transformers, static + compile", "parallelformers_ng, eager"]


@dataclass(frozen=True)
class Part:
    """A measurement and its time.

    Attributes:
        seconds: time limit. A part is told of two thirds of it, so that it can stop by itself.
        is_large: whether the part measures the large shape.
        run: function of the options that returns complaints.
        options: values that the part has beside the shape.
    """

    seconds: int
    is_large: bool
    run: Callable[[argparse.Namespace], list[str]]
    options: dict[str, Any]


def _of(name: str) -> Callable[[argparse.Namespace], list[str]]:
    return lambda options: gpu_parts.run(argparse.Namespace(**vars(options), what=name))


PARTS = {
    "speed": Part(100, True, gpu.speed, {"batches": [1], "contestants": MAIN}),
    "callers of the small shape": Part(45, False, _of("callers"), {}),
    "restart": Part(30, False, gpu.restart, {}),
    "restart of two ranks": Part(30, False, gpu.restart_of_two, {}),
    "kernels": Part(30, True, _of("kernels"), {}),
    "speed of low bits": Part(150, True, gpu.speed, {"batches": [1, 8], "contestants": LOW_BITS}),
    "steps": Part(100, False, _of("steps"), {}),
    "callers": Part(120, True, _of("callers"), {}),
    "speed of 8 rows": Part(90, True, gpu.speed, {"batches": [8], "contestants": MAIN[:2]}),
    "one rank of several": Part(250, True, _of("alone"), {}),
    "profile": Part(40, False, _of("profile"), {}),
    "speed of others": Part(60, False, gpu.speed, {"batches": [1], "contestants": OTHERS}),
    "sums": Part(30, False, _of("sums"), {}),
}
SETS = {
    "core": ["speed", "callers of the small shape", "restart", "restart of two ranks", "kernels"],
    "lowbit": ["speed of low bits", "steps"],
    "crowd": ["callers", "speed of 8 rows"],
    "alone": ["one rank of several"],
}
"""Part of `make gpu` → its measurements, the most important first: the last ones are left out if the time is up."""


class OutOfTimeError(BaseException):
    """A part reached its time limit. No Exception: a part goes on with its next measurement after one."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in this thread, the main one, once the time is up."""

    def end(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(names: list[str], options: argparse.Namespace, end: float) -> list[str]:
    """Run parts, print what each one does, and return the complaints.

    Args:
        names: keys of PARTS.
        options: device, file of figures, and the two shapes.
        end: time on the monotonic clock after which no part runs.
    """
    wrong = []
    for name in names:
        part = PARTS[name]
        seconds = min(part.seconds, end - time.monotonic())
        if seconds <= 0:
            wrong.append(f"{name}: not begun, the time is up")
            continue
        print(f"== {name}", flush=True)
        shape = options.large if part.is_large else options.small
        own = {"shape": shape, "seconds": seconds * 2 / 3, "device": options.device, "json": options.json}
        begun = time.monotonic()
        try:
            with limit(seconds):
                wrong += part.run(argparse.Namespace(**own | part.options))
        except (Exception, OutOfTimeError) as error:
            wrong.append(gpu.complaint(name, error))
        gpu.free(options.device)
        print(f"== {name}: {time.monotonic() - begun:.0f} s", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)}; default: all")
    parser.add_argument("--set", choices=SETS, help="parts of `make gpu PART=…`, in the place of names")
    parser.add_argument("--large", choices=gpu.SHAPES, default="8B")
    parser.add_argument("--small", choices=gpu.SHAPES, default="8B-8-layers")
    parser.add_argument("--seconds", type=float, default=500.0, help="time of all parts")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    end = time.monotonic() + options.seconds
    names = options.parts or SETS.get(options.set, [*PARTS])
    gpu.end_with(lambda options: run(names, options, end), options)


if __name__ == "__main__":
    main()
