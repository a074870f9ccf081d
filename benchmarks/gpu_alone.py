"""Measures one rank of 1, 2, 4 or 8 on one device: the compute part of tensor parallelism at that size.

The rank holds its part of the weights and runs its usual steps, but it has no peers: a sum returns its tensor at once,
and a gather repeats the rank's own part. Its tokens are wrong, its work is that of a real rank. With the time of a sum,
the figures say what that many devices would give.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.gpu_ranks import ProfilesSteps
from parallelformers_ng.autopolicy.planning import make_plan
from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import ShardStore, hand_over
from parallelformers_ng.collectives.communicator import Communicator, summable
from parallelformers_ng.cuda_graphs.modes import CAPTURED
from parallelformers_ng.options import FitOptions, QuantizeOptions
from parallelformers_ng.wire.frame import FileDescriptor
from parallelformers_ng.worker.call import Call
from parallelformers_ng.worker.runner import ModelRunner

RANKS, ROWS, PROMPTS, TOKENS = (1, 8, 4, 2), (1, 16), (512, 4096), 48
"""One rank of 1 and of 8 come first, because their ratio matters most if the time is up."""
WEIGHTS = ("bf16", "int8")


class NoPeers(Communicator):
    """Communicator of rank 0 without other ranks: exchanges nothing, and waits for nothing."""

    capturable = True

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return summable(tensor)

    def gather(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        repeats = [1] * tensor.dim()
        repeats[dim] = math.ceil(sum(sizes) / max(1, tensor.shape[dim]))
        return tensor.detach().repeat(repeats).narrow(dim, 0, sum(sizes)).contiguous()

    def _part(self, width: int) -> Communicator:
        return NoPeers(self.rank % width, width)

    def abort(self, reason: str) -> None:
        raise AssertionError(f"a rank alone has nobody to abort: {reason}")


class Tokens:
    """Stands for a worker's `Emitter`: records the time of each token of a call."""

    sequence = 1

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, value: Any) -> None:
        if value is not None:
            self.times.append(time.perf_counter())


class RankAlone(ProfilesSteps, ModelRunner):
    """Rank 0 of `world_size` ranks, in this process."""

    def __init__(self, world_size: int, device: str) -> None:
        place = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        super().__init__(0, world_size, place, NoPeers(0, world_size), Tokens())

    @torch.inference_mode(False)  # a worker gets tensors with versions
    def generate(self, ids: torch.Tensor, tokens: int) -> list[float]:
        """Run a call of `generate`; return the times of its tokens. The first is that of the prompt."""
        self.emit.times = []
        arguments = {"max_new_tokens": tokens, "min_new_tokens": tokens, "use_cache": True, **gpu.HOW}
        captured = self.device.type == "cuda"
        if captured:
            arguments |= {"cache_implementation": "static", **CAPTURED.options}
        call = Call("", "generate", (ids.to(self.device, copy=True),), arguments, streams=True, captured=captured)
        answer = self.run(replace(call, rng=torch.get_rng_state().numpy().tobytes()))
        if captured and answer is not None and answer.uncaptured:  # type: ignore[union-attr]
            raise ValueError(f"the steps were not captured: {answer.uncaptured}")  # type: ignore[union-attr]
        return self.emit.times[1:]  # the streamer gets the prompt first


@contextlib.contextmanager
@torch.inference_mode(False)
def rank_alone(options: argparse.Namespace, world_size: int, weights: str) -> Iterator[tuple[RankAlone, int]]:
    """Yield rank 0 of `world_size`, and the bytes of its weights that a decode step reads."""
    model = gpu.build(options.shape, options.device)
    quantize = None if weights == "bf16" else QuantizeOptions(weights)
    plan = make_plan(model, world_size, None, None, FitOptions(), quantize)
    skeleton, store = Skeleton.of(model, plan), ShardStore(plan)
    hand_over(model, store, list(plan.tensors))
    store.settle()
    del model
    gpu.free(options.device)
    rank = RankAlone(world_size, options.device)
    try:
        rank.build(skeleton)
        rank.attach(tuple(FileDescriptor(os.dup(fd)) for fd in store.fds_for(0)), Checkpoint({}))
        rank.loaded()
        del store
        looked_up = rank.model.get_input_embeddings().weight
        yield rank, plan.bytes_per_rank[0] - looked_up.nbytes
    finally:
        rank.drop()
        gc.collect()
        gpu.free(options.device)


def alone(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the measurements of one rank of each number of ranks, without its sums."""
    bandwidth = gpu.copy_bandwidth(options.device)
    gpu.save(options, "copy bandwidth, GB/s", bandwidth / 1e9)
    steps: dict[tuple[str, int, int], float] = {}

    def measured(rank: RankAlone, nbytes: int, weights: str, rows: int, prompt: int) -> dict[str, float]:
        ids = torch.arange(rows * prompt).view(rows, prompt).remainder(200) + 3
        rank.generate(ids, TOKENS)  # recordings and trials
        begun = time.perf_counter()
        times = rank.generate(ids, TOKENS)
        each = (times[-1] - times[0]) / (len(times) - 1)
        figures = {
            "steps/s": 1 / each,
            "of a copy": nbytes / each / bandwidth,
            "to the first token, ms": (times[0] - begun) * 1e3,
        }
        alike = steps.setdefault((weights, rows, prompt), each)  # of one rank of 1, which comes first
        return figures | {"× one rank of 1": alike / each}

    def kernels(rank: RankAlone) -> dict[str, float]:
        ids = torch.arange(PROMPTS[0])[None].remainder(200) + 3
        rank.generate(ids, TOKENS)
        counts, times = [], []
        for tokens in (2, TOKENS):
            rank.begin_profile()
            rank.generate(ids, tokens)
            table, microseconds = rank.end_profile()
            counts.append(rank.kernel_count)
            times.append(microseconds)
        print(table, flush=True)
        steps_between, layers = TOKENS - 2, rank.model.config.num_hidden_layers
        return {
            "kernels a step": (counts[1] - counts[0]) / steps_between,
            "kernels a layer": (counts[1] - counts[0]) / steps_between / layers,
            "device time of a step, µs": (times[1] - times[0]) / steps_between,
        }

    for weights in WEIGHTS:
        for world_size in RANKS:
            with rank_alone(options, world_size, weights) as (rank, nbytes):
                for rows in ROWS:
                    for prompt in PROMPTS:
                        name = f"one rank of {world_size}, {weights}, {rows} rows, {prompt} tokens"
                        yield name, partial(measured, rank, nbytes, weights, rows, prompt)
                if weights == WEIGHTS[0]:
                    yield f"kernels of one rank of {world_size}", partial(kernels, rank)
