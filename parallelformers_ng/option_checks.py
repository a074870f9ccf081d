"""Checks options: their names, types, switches and seconds. The errors name the caller's argument."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

import dacite

from parallelformers_ng.errors import CheckpointError, ParallelError, did_you_mean

Seconds = int | float
_Options = TypeVar("_Options")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def check_switches(**switches: Any) -> None:
    """Raise an error for arguments that are neither True nor False. Python would treat the text "no" as true.

    Args:
        switches: arguments by name.

    Raises:
        ParallelError: an argument is neither True nor False.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ParallelError(f"{name} is {value!r}; it takes True or False")


_SUCCESSORS = {"prefill_chunk": "; set prefill_patience, the milliseconds that decoding rows wait for prompts"}
"""Name of an option of an earlier release → end of the error message."""


def read_options(cls: type[_Options], options: _Options | Mapping[str, Any] | None, argument: str) -> _Options:
    """Return checked options as a dataclass.

    Args:
        cls: type of the options, a dataclass.
        options: an instance of `cls`; a mapping from field names to values; or None for the defaults.
        argument: name of the argument that the caller used, for error messages.

    Raises:
        ParallelError: `options` has another type; or a field has an unknown name or a value of another type. The
            message names the argument and the field. `cls` may raise a ParallelError for a wrong value, for example
            `WorkerOptions` a PlacementError.
    """
    if isinstance(options, cls):
        options = vars(options)  # the fields are checked below, because a dataclass does not check types
    if options is None:
        return cls()
    if not isinstance(options, Mapping):
        raise ParallelError(f"{argument} is {options!r}; it takes {cls.__name__}(…) or a dict of its fields")
    # dacite calls a mapping's class with (key, value) pairs, which fails for a defaultdict, so it gets plain dicts.
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in options.items()}
    kinds = get_type_hints(cls)
    try:
        return dacite.from_dict(cls, values, _STRICTLY)
    except dacite.UnexpectedDataError as error:
        name = min(map(str, error.keys))
        hint = _SUCCESSORS.get(name) or did_you_mean(name, kinds) or f"; it takes {', '.join(kinds)}"
        raise ParallelError(f"{argument} has no option {name!r}{hint}") from None
    except dacite.WrongTypeError as error:
        name = str(error.field_path)
        kind = inspect.formatannotation(kinds[name]).replace("bool", "True or False")
        raise ParallelError(f"{argument}: {name} is {options[name]!r}; it takes {kind}") from None


def _no_switch(value: Any) -> Any:
    """Raise an error for True and False, which Python would accept as the numbers 1 and 0."""
    if isinstance(value, bool):
        raise dacite.WrongTypeError(int, value)
    return value


def _no_mapping(value: Any) -> Any:
    """Raise an error for a mapping, which dacite would try to fill with the items of a list."""
    if isinstance(value, Mapping):
        raise dacite.WrongTypeError(list, value)
    return value


_HOOKS: dict[Any, Any] = dict.fromkeys((int, float), _no_switch)
_HOOKS |= dict.fromkeys((list[str], list[int | float]), _no_mapping)
_STRICTLY = dacite.Config(strict=True, type_hooks=_HOOKS)


def checked_seconds(seconds: Any, name: str) -> Seconds:
    """Return `seconds` unchanged, or raise an error if the value is no valid time limit.

    Args:
        seconds: number of seconds to check.
        name: name of the caller's argument, for the error message.

    Raises:
        ParallelError: `seconds` is not a number, is True or False, or is not more than 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ParallelError(f"{name} is {seconds!r}; it takes seconds, more than 0")
    return seconds


def check_number(number: int, name: str, least: int) -> None:
    """Raise ParallelError if a number is less than `least`. `name` is that of the caller's argument."""
    if number < least:
        raise ParallelError(f"{name} is {number}; it takes a number, at least {least}")


def parse_size(
    size: int | str, argument: str = "max_shard_size", refusal: type[ParallelError] = CheckpointError
) -> int:
    """Return a size in bytes: "5GB" → 5 000 000 000, "1GiB" → 1 073 741 824.

    Args:
        size: number of bytes, or a number with a unit: KB, MB, GB, TB, KiB, MiB, GiB or TiB.
        argument: name of the caller's argument, for the error.
        refusal: class of the error for an invalid size.

    Raises:
        ParallelError: the size is not positive or not of this form. The class of the error is `refusal`.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    text = str(size).strip().upper()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    with contextlib.suppress(ValueError):  # the error for every invalid size is raised below
        if unit and (count := float(text.removesuffix(unit))) > 0:
            return int(count * _UNITS[unit])
    raise refusal(f"{argument} is {size!r}; it takes bytes, or a text like '5GB' or '500MB'")


CPU = "cpu"
"""Key of `max_memory` for the RAM of weights without room on a device."""


def sizes_in_bytes(max_memory: Mapping[int | str, int | str]) -> dict[int | str, int]:
    """Convert the sizes of the option `max_memory` to bytes.

    Raises:
        ParallelError: a size is negative, or has no known unit.
    """
    return {
        key: 0 if size == 0 else parse_size(size, f"fit: max_memory[{key!r}]", ParallelError)
        for key, size in max_memory.items()
    }


def check_devices(max_memory: Mapping[int | str, object], devices: Sequence[int]) -> None:
    """Raise ParallelError unless the keys of `max_memory` are all numbers in `devices`, and at most "cpu" besides."""
    known = ", ".join(map(str, devices))
    for key in max_memory:
        if key != CPU and key not in devices:
            raise ParallelError(f"fit: max_memory has an unknown device {key!r}; known devices: {known}, {CPU!r}")
    for key in devices:
        if key not in max_memory:
            raise ParallelError(f"fit: max_memory has no size for device {key}; give a size for each of {known}")
