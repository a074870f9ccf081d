"""Defines the forecast flags of `parallelformers-ng plan MODEL --device h100 …`."""

from __future__ import annotations

import argparse
from typing import Any

from parallelformers_ng.errors import ParallelError

_FLAGS = ("batch", "length")
_OF_RANKS = {"ratio": None, "strategy": "tensor", "tensor": None}
"""Option of a plan → default. A forecast refuses these options, because a forecast chooses the best strategy."""


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the forecast flags to a command."""
    flags = command.add_argument_group(
        "forecast", "Memory of each device, tokens per second and the best strategy, from data sheets."
    )
    flags.add_argument("--device", metavar="NAME", help="h100, h200, a100, l40s, …; a wrong name lists all names")
    flags.add_argument("--batch", type=int, metavar="N", help="total of sequences decoded together (default: 1)")
    flags.add_argument("--length", type=int, metavar="T", help="prompt and new tokens of a sequence (default: 4096)")


def forecast_arguments(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the keyword arguments of `forecast`, except the model and its policies; None without `--device`.

    Args:
        options: parsed arguments of the command `plan`.

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
    options_of_both = {name: getattr(options, name) for name in ("device", "num_gpus", "dtype", "quantize")}
    return {**flags, **options_of_both}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
