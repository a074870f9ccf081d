"""Starts a cluster of Ray nodes on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]

_ATTEMPTS = 5
_PATIENT = {
    "RAY_health_check_timeout_ms": "60000",  # a busy machine must not look like a failed one
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def ray_cluster(nodes: int, cpus: int, gpus: int = 0) -> Iterator[Any]:
    """Yield a running cluster to which this process is connected. The head has no room for ranks; the other nodes have
    room.

    Args:
        nodes: number of nodes besides the head.
        cpus: number of ranks that fit on each node.
        gpus: number of devices that each node claims to have.
    """
    with mock.patch.dict(os.environ, _PATIENT):
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            add_node(cluster, 0, include_dashboard=False)
            for _ in range(nodes):
                add_node(cluster, cpus, num_gpus=gpus)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_node(cluster: Any, cpus: int, **more: Any) -> Any:
    """Add a node with room for `cpus` ranks; try again if the node does not start within Ray's limit of half a
    minute."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(Exception):
            return cluster.add_node(num_cpus=cpus, **more)
    return cluster.add_node(num_cpus=cpus, **more)
