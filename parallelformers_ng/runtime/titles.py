"""Titles for `ps` and `htop` of the processes that this package starts."""

from __future__ import annotations

import contextlib

_caller = 0


def begin(role: str, caller: int) -> None:
    """Set the title of this process; its forks have it until they set their own.

    Args:
        role: "fork server".
        caller: id of the process that uses it.
    """
    global _caller
    _caller = caller
    show(role)


def show(role: str) -> None:
    """Show that this process is something else from now on.

    Args:
        role: "rank 0 of 2, LlamaForCausalLM".
    """
    with contextlib.suppress(ImportError):  # what people see is not worth a failure
        from setproctitle import setproctitle

        setproctitle(f"parallelformers-ng: {role}, for process {_caller}")
