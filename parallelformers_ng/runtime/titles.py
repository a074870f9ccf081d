"""Sets the titles that `ps` and `htop` show for the processes of this package."""

from __future__ import annotations

from setproctitle import setproctitle

_caller = 0


def begin(role: str, caller: int) -> None:
    """Set the title of this process; forks keep the title until `show` is called in the fork."""
    global _caller
    _caller = caller
    show(role)


def show(role: str) -> None:
    setproctitle(f"parallelformers-ng: {role}, for process {_caller}")
