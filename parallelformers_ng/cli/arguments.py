"""Parses words of the command line; wrong words end the command before the import of torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from parallelformers_ng.errors import ParallelError


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong argument in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the arguments\n")


def numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} has no numbers with commas, such as 1,3") from None


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a function for argparse's `type=` that returns its text unchanged if `check` raises no ParallelError."""

    def convert(text: str) -> str:
        try:
            check(text)
        except ParallelError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return convert
