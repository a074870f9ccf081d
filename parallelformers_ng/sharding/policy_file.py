"""Reads policies from a Python file outside packages, for the command line."""

from __future__ import annotations

import runpy
from pathlib import Path

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.policy import Policy
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler


def policies_of_file(path: str) -> list[type[Policy]]:
    """Run a Python file, and return the policies that it defines, in the file's order.

    Policies that the file imports are left out.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file of policies at {path}")
    try:
        defined = runpy.run_path(path, run_name="policies")
    except Exception as error:  # the file's code may raise anything
        raise_if_of_handler(error)
        raise PolicyError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    policies = [value for value in defined.values() if isinstance(value, type) and issubclass(value, Policy)]
    own = [policy for policy in policies if policy.__module__ == "policies"]
    if not own:
        raise PolicyError(f"{path} defines no policy; define a class that inherits from Policy (POLICY.md)")
    return own
