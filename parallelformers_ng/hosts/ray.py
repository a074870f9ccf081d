"""Ranks on the hosts of a Ray cluster, in a placement group: on as few hosts as have room, a bundle for each rank.

On each host an actor in the first of its bundles is the agent, whose children the ranks are. The other bundles have no
actor: what Ray reserves in them the ranks take, and they end with the agent.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallelformers_ng.errors import ParallelError, StartupError
from parallelformers_ng.hosts.ray_actor import Agent, reserved_devices
from parallelformers_ng.options import RayOptions
from parallelformers_ng.wire.meeting import Listener

_WAIT_SECONDS = 0.2
_GOODBYE_SECONDS = 5.0


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ParallelError(
            "launcher is 'ray', and Ray is not installed; pip install 'parallelformers-ng[ray]', on all hosts"
        ) from None
    return ray


class Connection:
    """This process's connection to a cluster. One that was there is used; one that is made for a launcher ends with the
    last that uses it, by `close` or by dropping it.

    Args:
        options: options of the cluster.

    Raises:
        ParallelError: Ray is not installed, or this process is connected to another cluster.
        StartupError: there is no such cluster.
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
                        f"ray: address is {options.address!r}, and this process is connected to {at}; leave it out, or"
                        " call ray.shutdown() first"
                    )
            else:
                try:
                    ray.init(address=options.address, logging_level=logging.WARNING)
                except (ConnectionError, ValueError, RuntimeError) as error:
                    raise StartupError(f"ray: there is no cluster at {options.address!r}: {error}") from error
                Connection._is_ours = True
            Connection._users += 1
        self.close = weakref.finalize(self, Connection._leave)  # idempotent

    @staticmethod
    def nodes() -> list[dict[str, float]]:
        """Return the resources of each node of the cluster."""
        return [node["Resources"] for node in _ray().nodes() if node["Alive"]]

    @staticmethod
    def _leave() -> None:
        with Connection._lock:
            Connection._users -= 1
            if not Connection._users and Connection._is_ours:
                Connection._is_ours = False
                _ray().shutdown()


class RayHosts:
    """A `Launcher`: a placement group, and an agent on each of its hosts.

    Args:
        options: options of the user.
        connection: to the cluster, which it closes.
        width: ranks of each bundle.
    """

    def __init__(self, options: RayOptions, connection: Connection, width: int = 1) -> None:
        self.key = secrets.token_bytes(32)
        self.threads = max(1, int(options.cpus))
        self._options = options
        self._width = width
        self._connection = connection
        self._listener: Listener | None = None
        self._placed: Any = None
        self._serving: dict[Any, str] = {}  # what an agent's call will return → the name of its host
        self._agents: list[Any] = []

    def start(
        self, world_size: int, device: str, deadline: float, check: Callable[[], None]
    ) -> tuple[Listener, list[int]]:
        ray = _ray()
        bundles_on: dict[str, list[int]] = {}
        for index, node in self._place(world_size, device, deadline, check).items():
            bundles_on.setdefault(node, []).append(index)
        devices = self._devices(world_size // self._width, deadline, check) if device == "cuda" else {}
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        self._listener = Listener(ray.util.get_node_ip_address(), self.key)
        for number, (node, bundles) in enumerate(bundles_on.items()):
            name = f"{nodes[node]['NodeManagerAddress']} (Ray node {node[:8]})"
            agent = ray.remote(Agent).options(**self._in_bundle(bundles[0])).remote()
            seconds = deadline - time.monotonic()
            self._agents.append(agent)
            here = [name for bundle in bundles for name in devices.get(bundle, ())]
            self._serving[agent.serve.remote(self._listener.address, self.key, number, name, seconds, here)] = name
        return self._listener, [self._width * len(bundles) for bundles in bundles_on.values()]

    def _place(self, world_size: int, device: str, deadline: float, check: Callable[[], None]) -> dict[int, str]:
        """Reserve what the ranks take. Returns the node of each bundle."""
        ray = _ray()
        bundle = bundle_of(self._options, device, self._width)
        self._placed = ray.util.placement_group([bundle] * (world_size // self._width), strategy="PACK")
        while not self._placed.wait(_WAIT_SECONDS):
            check()
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"the Ray cluster had no room in time for {world_size // self._width} times {bundle}, which"
                    f" {world_size} ranks on {device} take: of"
                    f" {ray.cluster_resources()} it has {ray.available_resources()} left. Ask for fewer ranks, or"
                    " allow more time with start_timeout="
                )
        return ray.util.placement_group_table(self._placed)["bundles_to_node_id"]

    def _devices(self, bundles: int, deadline: float, check: Callable[[], None]) -> dict[int, list[str]]:
        """Return the devices that Ray has reserved in each bundle. What runs in a bundle is told; they stay the
        bundle's."""
        ray = _ray()
        pending = {
            bundle: ray.remote(reserved_devices).options(**self._in_bundle(bundle, self._width)).remote()
            for bundle in range(bundles)
        }
        while len(ray.wait(list(pending.values()), num_returns=bundles, timeout=_WAIT_SECONDS)[0]) < bundles:
            check()
            if time.monotonic() >= deadline:
                raise StartupError("the Ray cluster did not say in time which devices it has reserved for the ranks")
        return {bundle: ray.get(answer) for bundle, answer in pending.items()}

    def _in_bundle(self, bundle: int, devices: int = 0) -> dict[str, Any]:
        """Return the options of a task or actor in a bundle, with so many of its devices."""
        place = _ray().util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placed, bundle)
        return {
            "num_cpus": self._options.cpus,
            "num_gpus": devices,
            "resources": self._options.resources,
            "runtime_env": self._options.runtime_env,
            "scheduling_strategy": place,
        }

    def check(self) -> None:
        ray = _ray()
        if not self._serving:
            return
        for ended in ray.wait(list(self._serving), timeout=0)[0]:
            try:
                ray.get(ended)
            except Exception as error:  # of its process, its environment, its host
                raise StartupError(f"the agent on {self._serving[ended]} ended: {error}") from error

    def close(self, patient: bool) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._placed is not None and _ray().is_initialized():  # at the end of the interpreter Ray may have ended
            if patient:
                self._await_agents()
            _ray().util.remove_placement_group(self._placed)
            self._placed = None
        self._connection.close()

    def _await_agents(self) -> None:
        """Let the agents end, which have heard that the group is over: an actor that is ended says so in the log."""
        serving, self._serving = list(self._serving), {}
        if serving:
            _ray().wait(serving, num_returns=len(serving), timeout=_GOODBYE_SECONDS)


def bundle_of(options: RayOptions, device: str, width: int) -> dict[str, Any]:
    """Return the resources to reserve for the ranks of a stage, on one node; without stages, for a rank."""
    each = {"CPU": options.cpus, **({"GPU": 1} if device == "cuda" else {}), **options.resources}
    return {name: amount * width for name, amount in each.items()}


def ranks_of_each(world_size: int, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many ranks each host has, where all are to have equally many and no more hosts are to be taken than
    need be. 1 if there is no room for all of them.

    Args:
        bundle: resources of one bundle.
        nodes: resources of each node.
    """
    rooms = [min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes]
    widths = [width for width in range(1, world_size + 1) if world_size % width == 0]
    return max([1, *(width for width in widths if sum(room // width for room in rooms) >= world_size // width)])
