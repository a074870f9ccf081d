"""A cluster of Ray nodes on this machine."""

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
    "RAY_health_check_timeout_ms": "60000",  # a machine that is busy must not look like one that fails
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def ray_cluster(nodes: int, cpus: int, gpus: int = 0) -> Iterator[Any]:
    """A running cluster that this process is connected to: a head without room for ranks, and nodes with room for
    some ranks and pretended devices."""
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
    """A further node, with room for so many ranks. Ray gives one that starts half a minute, which may be too short."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(Exception):
            return cluster.add_node(num_cpus=cpus, **more)
    return cluster.add_node(num_cpus=cpus, **more)
