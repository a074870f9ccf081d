"""`parallelformers-ng plan MODEL --device h100 …`: what a model would need and give on devices that may not be here."""

from __future__ import annotations

import argparse
from typing import Any

from parallelformers_ng.errors import ParallelError

_FLAGS = ("hosts", "gpus_per_host", "batch", "length", "network", "decode")
_OF_RANKS = {"ratio": None, "strategy": "tensor"}
"""Options of a plan, with their defaults, that a forecast has no use for: it looks for the best strategy."""


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of a forecast."""
    flags = command.add_argument_group(
        "forecast", "Memory of each device, tokens per second and how to lay the model out, by data sheets."
    )
    flags.add_argument("--device", metavar="NAME", help="h100, h200, a100, l40s, …, a wrong name lists them; or here")
    flags.add_argument("--hosts", type=int, metavar="N", help="hosts that are alike (default: 1)")
    flags.add_argument("--gpus-per-host", type=int, metavar="N", help="devices of each (default: that of --num-gpus)")
    flags.add_argument("--batch", type=int, metavar="N", help="sequences at a time, in all (default: 1)")
    flags.add_argument("--length", type=int, metavar="T", help="tokens of each, prompt and answer (default: 4096)")
    flags.add_argument("--network", metavar="NAME", help="between hosts (default: infiniband-ndr)")
    flags.add_argument("--decode", metavar="HOW", help="eager, cuda_graphs or compile (default: cuda_graphs)")


def given(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the keyword arguments of a forecast, besides the model and its policies; None if no forecast was asked
    for.

    Raises:
        ParallelError: an option is given that has no meaning beside the others.
    """
    flags = {name: getattr(options, name) for name in _FLAGS if getattr(options, name) is not None}
    if options.device is None:
        if flags:
            raise ParallelError(f"{_flag(next(iter(flags)))} is for a forecast; say which devices, with --device h100")
        return None
    for name, default in _OF_RANKS.items():
        if getattr(options, name) != default:
            raise ParallelError(f"{_flag(name)} is for a plan of given ranks, and --device asks which there should be")
    flags.setdefault("gpus_per_host", options.num_gpus)
    return {**flags, "device": options.device, "dtype": options.dtype, "quantize": options.quantize}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
