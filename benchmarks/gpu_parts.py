"""Measures the parts of a decode step on GPUs, with random weights.

    python -m benchmarks.gpu_parts kernels [--shape 8B] [--seconds 60] [--json OUT]
    python -m benchmarks.gpu_parts steps   [--shape 1B] [--seconds 100] [--json OUT]
    python -m benchmarks.gpu_parts callers [--shape 1B] [--seconds 60] [--json OUT]
    python -m benchmarks.gpu_parts profile [--shape 1B] [--json OUT]
    python -m benchmarks.gpu_parts sums    [--json OUT]
    python -m benchmarks.gpu_parts alone   [--shape 8B] [--seconds 250] [--json OUT]

`kernels` compares each Triton kernel with its torch twin and with the bandwidth of a copy; `steps` compares decode
steps with and without the kernels; `callers` measures batched calls of `generate`; `profile` lists the kernels of
recorded decode steps by their time; `sums` compares small sums of two devices with NCCL's; `alone` measures one rank
of 1, 2, 4 and 8 without its sums. Each figure is written to OUT, and to the page beside OUT, as soon as it is measured.
A measurement that does not begin for lack of time is named.

The program fails if a kernel's result differs from its twin's, if a trial left steps "with kernels" to the modules, or
if a measurement raises an error. The other measurements run all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks import gpu, measure
from benchmarks.gpu_alone import alone
from benchmarks.gpu_cases import Case, cases
from parallelformers_ng import parallelize, warm_up
from parallelformers_ng.model import groups
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup

ROWS, CONTEXTS = (1, 8, 32), (512, 8192, 32768)
CALLERS, PROMPT, TOKENS = (1, 16, 32), 512, 48
WARM_UPS, BURSTS = 4, 4
"""Runs of all callers before the measured ones, in which the first steps of each number of rows are recorded and
compared, and measured runs."""
WEIGHTS = ("bf16", "int8", "int4")
MAX_TOKENS = 1 << 18
"""Most tokens of all prompts of a step: more do not fit on a device of 80 GB while they are read."""
SUM_BYTES = (8 << 10, 64 << 10, 128 << 10, 255 << 10)
MIN_BYTES = 256 << 20
"""Bytes that the copies of a kernel's tensors have together: more than the caches of a device."""
MAX_DIFFERENCE = 0.02
"""Largest difference of a kernel's result from its twin's, as a share of the twin's largest number."""
RANKS = {"with kernels": "benchmarks.gpu_ranks:WithKernels", "without": "benchmarks.gpu_ranks:WithoutKernels"}
SUM_RANK = "benchmarks.gpu_ranks:SumRank"
PROFILED_RANK = "benchmarks.gpu_ranks:Profiled"


def kernels(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the measurement of each kernel."""
    bandwidth = gpu.copy_bandwidth(options.device)
    gpu.save(options, "copy bandwidth, GB/s", bandwidth / 1e9)

    def measured(case: Case) -> dict[str, float]:
        copies = [case.make() for _ in range(max(1, min(64, MIN_BYTES // case.nbytes)))]
        difference = disagreement(case)
        ours = seconds_of(options.device, lambda: [case.kernel(*each) for each in copies]) / len(copies)
        theirs = seconds_of(options.device, lambda: [case.twin(*each) for each in copies], not case.twin_waits)
        figures = {
            "kernel, µs": ours * 1e6,
            "twin, µs": theirs / len(copies) * 1e6,
            "share of the copy bandwidth": case.nbytes / ours / bandwidth,
            "difference": difference,
        }
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(f"the kernel differs from its twin by {difference:.3g}")
        return figures

    for case in cases(options.shape, options.device, ROWS, CONTEXTS):
        yield case.name, lambda case=case: measured(case)


def disagreement(case: Case) -> float:
    """Return the largest difference between a kernel's and its twin's results, as a share of the twin's largest
    number."""
    arguments = case.make()
    copied = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    ours, theirs = (
        [*result] if isinstance(result, tuple) else [result] for result in (case.kernel(*arguments), case.twin(*copied))
    )
    return max(
        ((our.float() - their.float()).abs().max() / their.float().abs().max()).item()
        for our, their in zip(ours, theirs, strict=True)
    )


def seconds_of(device: str, action: Callable[[], Any], captured: bool = True) -> float:
    """Return the seconds of an action, the shortest of three; on a device of a recorded one if `captured`."""
    action()
    if device == "cuda" and captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        action = graph.replay

    def run() -> None:
        action()
        gpu.finish(device)

    gpu.finish(device)
    return max(1e-9, min(measure.seconds(run) for _ in range(3)))


class Times(BaseStreamer):
    """A streamer that records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@contextlib.contextmanager
def deployed(options: argparse.Namespace, weights: str = "bf16", runner: str = "", **settings: Any) -> Iterator[Any]:
    """Yield a model of this library with one worker; `runner` replaces the worker's class."""
    usual, groups.RUNNER = groups.RUNNER, runner or groups.RUNNER
    workers, quantize = {"device": options.device}, None if weights == "bf16" else weights
    try:
        model = parallelize(
            gpu.build(options.shape, options.device), 1, workers=workers, quantize=quantize, progress=False, **settings
        )
    finally:
        groups.RUNNER = usual
    try:
        yield model
    finally:
        deployment_of(model).close()
        gc.collect()
        gpu.free(options.device)


def steps(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the measurements of decode steps: for each kind of weights with and without kernels, the sizes with the
    fewest tokens first. Each model gets an equal share of the time that is left, its start included."""
    every = sorted(((rows, context) for rows in ROWS for context in CONTEXTS), key=lambda size: size[0] * size[1])
    sizes = [(rows, context) for rows, context in every if rows * context <= MAX_TOKENS]
    print(f"left out, more than {MAX_TOKENS} tokens: {every[len(sizes) :]}", flush=True)
    ways = [(weights, name) for name in RANKS for weights in WEIGHTS]
    end, models = time.monotonic() + options.seconds, gpu.Clock(options.seconds)
    for place, (weights, name) in enumerate(ways):
        if not models.has_time_for(f"steps {name}, {weights}"):
            continue
        begun = time.monotonic()
        share = gpu.Clock((end - begun) / (len(ways) - place))
        runner = RANKS[name] if options.device == "cuda" else ""

        def measured(model: Any, rows: int, context: int, name: str = name, runner: str = runner) -> dict[str, float]:
            figures = steps_per_second(model, rows, context)
            if runner:
                check_kernels(model, name == "with kernels")
            return figures

        with deployed(options, weights, runner, decode=_decode(options)) as model:
            for number, (rows, context) in enumerate(sizes):
                what = f"step {name}, {weights}, {rows} rows, {context} tokens"
                if not number or share.has_time_for(what):
                    yield what, partial(measured, model, rows, context)
        models.note(time.monotonic() - begun)


def _decode(options: argparse.Namespace) -> str:
    return "cuda_graphs" if options.device == "cuda" else "eager"


def profile(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the measurement of the device's time in recorded decode steps; it prints the kernels."""
    with deployed(options, runner=PROFILED_RANK, decode=_decode(options)) as model:

        def measured() -> dict[str, float]:
            group, ids = deployment_of(model).replicas[0].group, torch.arange(PROMPT)[None].remainder(200) + 3
            settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, **gpu.HOW}
            model.generate(ids, **settings)  # captures
            group.call("begin_profile")
            model.generate(ids, **settings)
            table, microseconds = group.call("end_profile")
            print(table, flush=True)
            if options.device == "cuda" and not microseconds:
                raise ValueError("the profiler saw no time of the device")
            return {"device time of prefill and steps, µs": microseconds, "steps": TOKENS - 1}

        yield "profile", measured


def check_kernels(model: Any, are_due: bool) -> None:
    """Raise a ValueError if the Triton kernels compute the decode steps and should not, or the other way round."""
    if deployment_of(model).replicas[0].group.call("computes_by_kernels") != are_due:
        raise ValueError(f"the steps are computed {'without' if are_due else 'with'} kernels; the log says why")


def steps_per_second(model: Any, rows: int, context: int) -> dict[str, float]:
    """Return decode steps per second after a prompt; the first third of the steps, with captures, does not count."""
    ids = torch.arange(rows * context).view(rows, context).remainder(200) + 3
    streamer = Times()
    model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, streamer=streamer, **gpu.HOW)
    times = streamer.times[1 + TOKENS // 3 :]
    rate = (len(times) - 1) / max(1e-9, times[-1] - times[0])
    return {"steps/s": rate, "tokens/s": rate * rows}


def callers(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the measurements of concurrent calls, batched."""
    with deployed(options, batching={"rows": max(CALLERS)}) as model:

        def measured(count: int) -> dict[str, float]:
            def generate(ids: torch.Tensor) -> Any:
                return model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **gpu.HOW)

            def seconds() -> float:
                prompts = torch.randint(3, 200, (count, 1, PROMPT)).unbind()  # new ones: no prompt is kept from before
                return measure.seconds(lambda: list(pool.map(generate, prompts)))

            with ThreadPoolExecutor(count) as pool:
                bursts = [seconds() for _ in range(WARM_UPS + BURSTS)]
            steady = bursts[-BURSTS:]
            return {
                "tokens/s": count * TOKENS / min(steady),
                "median tokens/s": count * TOKENS / statistics.median(steady),
                "the first time, with captures, s": bursts[0],
            }

        for count in CALLERS:
            yield f"{count} callers", lambda count=count: measured(count)


def sums(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the measurements of sums between two devices; none if there is one device."""
    if torch.cuda.device_count() < 2:
        print("sums: not measured, there is one device", flush=True)
        return
    with WorkerGroup(2, "cuda", target=SUM_RANK) as group:
        for nbytes in SUM_BYTES:
            yield (
                f"sum of {nbytes} bytes",
                lambda nbytes=nbytes: {
                    f"{name}, µs": group.call("microseconds_of_sum", nbytes, by_nccl)
                    for name, by_nccl in (("NCCL", True), ("kernel", False))
                },
            )


def run(options: argparse.Namespace) -> list[str]:
    """Run the measurements of a part until the time is up, and return the complaints."""
    warm_up()
    clock, wrong = gpu.Clock(options.seconds), []
    try:
        with torch.inference_mode():
            for name, measured in PARTS[options.what](options):
                if not clock.has_time_for(name):
                    continue
                begun = time.monotonic()
                try:
                    gpu.save(options, name, measured())
                except Exception as error:
                    wrong.append(gpu.complaint(name, error))
                gpu.free(options.device)
                clock.note(time.monotonic() - begun)
    except Exception as error:
        wrong.append(gpu.complaint(options.what, error))
    return wrong


PARTS = {"kernels": kernels, "steps": steps, "callers": callers, "profile": profile, "sums": sums, "alone": alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--shape", choices=gpu.SHAPES, default="8B")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    gpu.end_with(run, options)


if __name__ == "__main__":
    main()
