"""Starts ranks on the nodes of a `torchrun` job. The process of rank 0 is the caller and continues with the program.
Every other process stops at the same line of the program, loads no model, and ends after the caller has ended.

The first process of each other node is the agent of its node; the agent of the caller's node is a thread of the caller.
Ranks are children of the agents.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import socket
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from parallelformers_ng.errors import ChannelClosedError, PlacementError, ProtocolError, StartupError
from parallelformers_ng.hosts import agent
from parallelformers_ng.hosts.launcher import Check, Launcher
from parallelformers_ng.wire.meeting import Address, Listener, call
from parallelformers_ng.worker.preload import warm_up

KEY = "PARALLELFORMERS_NG_KEY"  # environment variable that must have the same secret text on all nodes of a job

# Environment variable with the address at which other nodes reach the caller's node; MASTER_ADDR if it is not set.
INTERFACE = "PARALLELFORMERS_NG_ADDRESS"

_KEY_LENGTH = 32
_POLL_SECONDS = 60.0
_WHERE = "parallelformers_ng/address"


def is_running() -> bool:
    """Whether torchrun has started this process. A child process with the same environment variables counts, too."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "GROUP_WORLD_SIZE" in os.environ


def world_size(num_gpus: int | None) -> int:
    if not is_running():
        raise PlacementError("launcher is 'torchrun', but torchrun has not started this process")
    nodes, each, processes = (_number(name) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if nodes * each != processes:
        raise PlacementError(f"torchrun has started {processes} processes on {nodes} nodes; start equally many on each")
    if num_gpus not in (None, processes):
        raise PlacementError(
            f"num_gpus is {num_gpus}, but torchrun has started {processes} processes, one rank each; leave num_gpus"
            " out, or pass workers={'launcher': 'local'}, so that each process starts workers of its own"
        )
    return processes


def serve_unless_caller() -> None:
    """Return at once in the process of rank 0, the caller; end every other process of the torchrun job by SystemExit.

    On each node without rank 0, the process of local rank 0 first serves as agent until the caller has ended.
    """
    if _number("RANK") == 0:
        return
    if _number("GROUP_RANK") == 0 or _number("LOCAL_RANK"):
        sys.exit(0)  # the agent of this node starts the rank as a process of its own
    key, node = _key(), _number("GROUP_RANK")
    warm_up()
    address = _caller_address()
    groups: list[threading.Thread] = []
    try:
        while True:  # each `call` connects when the caller starts another group
            connection = call(address, key, b"host %d" % node, float("inf"))
            groups.append(threading.Thread(target=agent.serve, args=(connection, address, key, node), daemon=True))
            groups[-1].start()
    except ChannelClosedError:
        for group in groups:
            group.join()
    except ProtocolError as error:
        raise StartupError(f"{error}; set {KEY} to the same text on all nodes") from None
    sys.exit(0)


def _caller_address() -> Address:
    store = _store()
    while True:
        with contextlib.suppress(dist.DistStoreError):  # the caller has not published its address yet
            store.wait([_WHERE], timedelta(seconds=_POLL_SECONDS))
            host, _, port = store.get(_WHERE).decode().rpartition(" ")
            return host, int(port)


def _store() -> dist.Store:
    """Return torchrun's key-value store, through which the caller publishes its address to the other nodes. Anybody in
    the network can read and write the store, so write no secrets to it, and do not trust its data."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise StartupError("torchrun shares no store with its processes; unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], _number("MASTER_PORT"), is_master=False)
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _key() -> bytes:
    """Return the secret key of the job, 32 bytes: a hash of the text in `KEY`, or random if the job has one node."""
    if _number("GROUP_WORLD_SIZE") == 1:
        return secrets.token_bytes(_KEY_LENGTH)
    text = os.environ.get(KEY, "")
    if len(text) < _KEY_LENGTH:
        raise StartupError(
            f"{KEY} has {len(text)} characters; set it to the same secret text of at least {_KEY_LENGTH} characters on"
            f" all nodes: export {KEY}=$(openssl rand -hex 32), once, in the script that starts the job"
        )
    return hashlib.sha256(text.encode()).digest()


def _number(name: str) -> int:
    return int(os.environ[name])


class Torchrun(Launcher):
    """A `Launcher` for a torchrun job. torchrun has started the other processes, which run this library's agents and
    connect to this process when it starts a group.

    The agents end with this process. If an agent dies, torchrun ends the job. If the job has several nodes, the first
    object of this class publishes the address of this process in torchrun's store.
    """

    _lock = threading.Lock()

    def __init__(self) -> None:
        with Torchrun._lock:
            self.key, self._listener = _open()

    def start(self, world_size: int, device: str, deadline: float, check: Check) -> tuple[Listener, list[int]]:
        def serve_here() -> None:
            with contextlib.suppress(ChannelClosedError):
                connection = call(self._listener.address, self.key, b"host 0", deadline)
                agent.serve(connection, self._listener.address, self.key, 0)

        threading.Thread(target=serve_here, name="parallelformers_ng-agent", daemon=True).start()
        nodes = _number("GROUP_WORLD_SIZE")
        return self._listener, [world_size // nodes] * nodes


@functools.cache
def _open() -> tuple[bytes, Listener]:
    key = _key()
    if _number("GROUP_WORLD_SIZE") == 1:
        return key, Listener("127.0.0.1", key)
    name = os.environ.get(INTERFACE) or os.environ["MASTER_ADDR"]
    try:
        listener = Listener(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]), key)
    except (OSError, ValueError) as error:  # `Listener` raises ValueError for an address such as 0.0.0.0
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(
            f"{name} is not an address of this machine ({reason}); set {INTERFACE} to the address at which"
            " other nodes reach this machine"
        ) from None
    host, port = listener.address
    _store().set(_WHERE, f"{host} {port}")
    return key, listener
