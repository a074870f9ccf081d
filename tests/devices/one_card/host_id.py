"""Gives a rank a host of its own, as far as NCCL knows."""

from __future__ import annotations

import os


def pretend_own_host() -> None:
    """Let this process share its device with other ranks.

    NCCL refuses two ranks with one device and one hash of their host. `NCCL_HOSTID` replaces the hash (`getHostHash` of
    NCCL's `src/misc/utils.cc`). NCCL then connects the ranks by sockets, like ranks of different hosts.
    """
    os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"
