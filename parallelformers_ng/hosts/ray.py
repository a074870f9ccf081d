"""Starts ranks on as few hosts of a Ray cluster as possible, in a placement group with one bundle per rank or stage.

On each host, an actor in the host's first bundle is the agent, and the ranks are children of the agent. Other bundles
have no actor: their ranks use the resources that Ray reserves for these bundles, and end with the agent.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from parallelformers_ng.errors import ParallelError, StartupError
from parallelformers_ng.hosts.launcher import Check, Launcher
from parallelformers_ng.hosts.ray_actor import Agent, reserved_devices
from parallelformers_ng.options import RayOptions
from parallelformers_ng.wire.meeting import Listener
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_WAIT_SECONDS = 0.2  # interval between checks whether waiting for Ray has become useless
_GOODBYE_SECONDS = 5.0  # agents that do not end by themselves in this time are killed


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ParallelError(
            "launcher is 'ray', but Ray is not installed: pip install '.[ray]' in this library's folder on each host"
        ) from None
    return ray


class Connection:
    """One user of this process's connection to a Ray cluster, which is opened if there is none.

    If this class has opened the connection, it is closed when the last user calls `close` or is garbage-collected.
    """

    _lock = threading.Lock()
    _users = 0
    _is_ours = False

    def __init__(self, options: RayOptions) -> None:
        ray = _ray()
        with Connection._lock:
            if ray.is_initialized():
                at = ray.get_runtime_context().gcs_address
                if options.address not in (None, "auto", "local", at):
                    raise ParallelError(
                        f"ray: address is {options.address!r}, but this process is connected to {at}; leave address"
                        " out, or call ray.shutdown() first"
                    )
            else:
                try:
                    ray.init(address=options.address, logging_level=logging.WARNING)
                except (ConnectionError, ValueError, RuntimeError) as error:
                    raise StartupError(f"ray: no cluster can be reached at {options.address!r}: {error}") from error
                Connection._is_ours = True
            Connection._users += 1
        self.close = weakref.finalize(self, Connection._leave)  # a finalizer runs only once, so a second call is safe

    @staticmethod
    def nodes() -> list[dict[str, float]]:
        """Return the resources of each live node of the cluster, by Ray's names: `memory` in bytes, `CPU`, `GPU`, …"""
        return [node["Resources"] for node in _ray().nodes() if node["Alive"]]

    @staticmethod
    def _leave() -> None:
        with Connection._lock:
            Connection._users -= 1
            if not Connection._users and Connection._is_ours:
                Connection._is_ours = False
                _ray().shutdown()


class RayHosts(Launcher):
    """A `Launcher` that uses a placement group of a Ray cluster, with one agent on each host.

    Args:
        width: number of ranks of each bundle; must divide the number of ranks.
    """

    def __init__(self, options: RayOptions, connection: Connection, width: int = 1) -> None:
        self.key = secrets.token_bytes(32)
        self.threads = max(1, int(options.cpus))
        self._ray = _ray()
        self._options = options
        self._width = width
        self._connection = connection
        self._listener: Listener | None = None
        self._placed: Any = None
        self._serving: dict[Any, str] = {}  # Ray object reference of an agent's `serve` call → name of its host
        self._agents: list[Any] = []

    def start(self, world_size: int, device: str, deadline: float, check: Check) -> tuple[Listener, list[int]]:
        bundles_on: dict[str, list[int]] = {}
        for index, node in self._place(world_size, device, deadline, check).items():
            bundles_on.setdefault(node, []).append(index)
        devices = self._devices(world_size // self._width, deadline, check) if device == "cuda" else {}
        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        self._listener = Listener(self._ray.util.get_node_ip_address(), self.key)
        for number, (node, bundles) in enumerate(bundles_on.items()):
            name = f"{nodes[node]['NodeManagerAddress']} (Ray node {node[:8]})"
            agent = self._ray.remote(Agent).options(**self._in_bundle(bundles[0])).remote()
            seconds = deadline - time.monotonic()
            self._agents.append(agent)
            here = [name for bundle in bundles for name in devices.get(bundle, ())]
            self._serving[agent.serve.remote(self._listener.address, self.key, number, name, seconds, here)] = name
        return self._listener, [self._width * len(bundles) for bundles in bundles_on.values()]

    def _place(self, world_size: int, device: str, deadline: float, check: Check) -> dict[int, str]:
        bundle = bundle_of(self._options, device, self._width)
        self._placed = self._ray.util.placement_group([bundle] * (world_size // self._width), strategy="PACK")
        while not self._placed.wait(_WAIT_SECONDS):
            check()
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"the Ray cluster had no room in time for {world_size // self._width} times {bundle}, which"
                    f" {world_size} ranks on {device} need: of {self._ray.cluster_resources()},"
                    f" {self._ray.available_resources()} is free. Use fewer ranks, or allow more time with"
                    " start_timeout="
                )
        return self._ray.util.placement_group_table(self._placed)["bundles_to_node_id"]

    def _devices(self, bundles: int, deadline: float, check: Check) -> dict[int, list[str]]:
        """Return the GPU ids that Ray has reserved for each bundle, by bundle index. Only a task that runs in a bundle
        can read them, so the method runs a task in each bundle."""
        task = self._ray.remote(reserved_devices)
        pending = {at: task.options(**self._in_bundle(at, self._width)).remote() for at in range(bundles)}
        while len(self._ray.wait(list(pending.values()), num_returns=bundles, timeout=_WAIT_SECONDS)[0]) < bundles:
            check()
            if time.monotonic() >= deadline:
                raise StartupError("the Ray cluster did not report reserved devices in time; raise start_timeout=")
        return {bundle: self._ray.get(answer) for bundle, answer in pending.items()}

    def _in_bundle(self, bundle: int, devices: int = 0) -> dict[str, Any]:
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placed, bundle)
        return {
            "num_cpus": self._options.cpus,
            "num_gpus": devices,
            "resources": self._options.resources,
            "runtime_env": self._options.runtime_env,
            "scheduling_strategy": place,
        }

    def check(self) -> None:
        if not self._serving:
            return
        for ended in self._ray.wait(list(self._serving), timeout=0)[0]:
            try:
                self._ray.get(ended)
            except Exception as error:  # Ray raises various types if the agent's process, environment or host fails
                raise_if_of_handler(error)
                raise StartupError(f"the agent on {self._serving[ended]} ended: {error}") from error

    def close(self, patient: bool) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._placed is not None and self._ray.is_initialized():  # Ray may already be shut down at exit
            if patient and self._serving:  # wait, because Ray logs a message for each actor that it kills
                self._ray.wait(list(self._serving), num_returns=len(self._serving), timeout=_GOODBYE_SECONDS)
            self._ray.util.remove_placement_group(self._placed)
            self._placed = None
        self._connection.close()


def bundle_of(options: RayOptions, device: str, width: int) -> dict[str, Any]:
    """Return the resources of one bundle of the placement group: Ray's resource name → amount.

    Args:
        width: number of ranks of the bundle: all ranks of a pipeline stage, or 1 without stages.
    """
    each = {"CPU": options.cpus, **({"GPU": 1} if device == "cuda" else {}), **options.resources}
    return {name: amount * width for name, amount in each.items()}


def ranks_of_each(world_size: int, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return the largest number of ranks per host, equal on all hosts, for which the cluster has room; at least 1.
    `bundle` has the resources of one rank."""
    rooms = [min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes]
    widths = [width for width in range(1, world_size + 1) if world_size % width == 0]
    return max([1, *(width for width in widths if sum(room // width for room in rooms) >= world_size // width)])
