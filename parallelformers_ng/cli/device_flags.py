"""Defines the forecast flags of `parallelformers-ng plan MODEL --device h100 …`."""

from __future__ import annotations

import argparse
from typing import Any

from parallelformers_ng.errors import ParallelError

_FLAGS = ("hosts", "gpus_per_host", "batch", "length", "network", "decode")
_OF_RANKS = {"ratio": None, "strategy": "tensor", "tensor": None}
"""Option of a plan → default. A forecast refuses these options, because a forecast chooses the best strategy."""


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the forecast flags to a command."""
    flags = command.add_argument_group(
        "forecast", "Memory of each device, tokens per second and the best strategy, from data sheets."
    )
    flags.add_argument("--device", metavar="NAME", help="h100, h200, a100, l40s, …; 'here': CPU ranks of this machine")
    flags.add_argument("--hosts", type=int, metavar="N", help="number of equal hosts (default: 1)")
    flags.add_argument("--gpus-per-host", type=int, metavar="N", help="devices of each host (default: --num-gpus)")
    flags.add_argument("--batch", type=int, metavar="N", help="total of sequences decoded together (default: 1)")
    flags.add_argument("--length", type=int, metavar="T", help="prompt and new tokens of a sequence (default: 4096)")
    flags.add_argument("--network", metavar="NAME", help="network between hosts (default: infiniband-ndr)")
    flags.add_argument("--decode", metavar="MODE", help="eager, cuda_graphs or compile (default: cuda_graphs)")


def forecast_arguments(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the keyword arguments of `forecast`, except the model and its policies; None without `--device`.

    Raises:
        ParallelError: a forecast flag comes without `--device`, or a plan's flag with `--device`.
    """
    flags = {name: getattr(options, name) for name in _FLAGS if getattr(options, name) is not None}
    if options.device is None:
        if flags:
            raise ParallelError(
                f"{_flag(next(iter(flags)))} is for a forecast; add --device, for example --device h100"
            )
        return None
    for name, default in _OF_RANKS.items():
        if getattr(options, name) != default:
            raise ParallelError(
                f"{_flag(name)} is for a plan, but --device makes a forecast, which chooses the strategy; leave one of"
                " the two flags out"
            )
    flags.setdefault("gpus_per_host", options.num_gpus)
    return {**flags, "device": options.device, "dtype": options.dtype, "quantize": options.quantize}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
