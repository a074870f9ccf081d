"""A module of the program with values that the model of a walk reads, and with a stop flag."""

from __future__ import annotations


class Options:
    noise = 0.5


SCALE = 1.0
TABLE = {"scale": 1.0}
OPTIONS = Options()
stop = False
