"""Kills nodes of a Ray cluster during requests."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.chaos_figures import Figure
from parallelformers_ng import parallelize
from parallelformers_ng.errors import WorkerDiedError
from parallelformers_ng.model.parallelized import deployment_of
from tests.helpers.patience import is_running
from tests.helpers.ray_cluster import add_node, ray_cluster
from tests.helpers.saved_model import save_tiny_model

_NODES, _EACH = 2, 2
_LEFT_SECONDS = 5.0
_RESTART_SECONDS = 120.0


class _Strike:
    """A streamer that runs a function in a new thread at a given token."""

    def __init__(self, at: int, action: Any) -> None:
        self._tokens_left, self._action = at, action

    def put(self, _: torch.Tensor) -> None:
        self._tokens_left -= 1
        if not self._tokens_left:
            threading.Thread(target=self._action).start()

    def end(self) -> None:
        pass


def nodes(count: int, seed: int) -> list[Figure]:
    """Kill one of two nodes with two ranks each, at a random token of an answer, `count` times.

    A new node replaces the killed node each time.
    """
    draw = random.Random(seed)
    error_seconds, restart_seconds, unnamed, wrong, left = [], [], 0, 0, 0
    ids = torch.arange(1, 8)[None]
    with tempfile.TemporaryDirectory() as folder, ray_cluster(_NODES, _EACH) as cluster:
        path = save_tiny_model(Path(folder))
        expected = AutoModelForCausalLM.from_pretrained(path).eval().generate(ids, max_new_tokens=20)
        workers = {"launcher": "ray", "device": "cpu", "max_restarts": count + 1, "start_timeout": _RESTART_SECONDS}
        with parallelize(path, _NODES * _EACH, workers=workers, progress=False) as model:
            for _ in range(count):
                group = deployment_of(model).replicas[0].ready(time.monotonic() + _RESTART_SECONDS)[0]
                pids, name = group.pids, draw.choice(group.hosts.names)
                node = next(each for each in cluster.list_all_nodes() if each.node_id[:8] in name)
                struck: list[float] = []

                def strike(node: Any = node, struck: list[float] = struck) -> None:
                    struck.append(time.monotonic())
                    cluster.remove_node(node, allow_graceful=False)

                try:
                    model.generate(ids, max_new_tokens=1900, streamer=_Strike(draw.randrange(2, 60), strike))
                    unnamed += 1
                except WorkerDiedError as error:
                    error_seconds.append(time.monotonic() - struck[0])
                    unnamed += error.host != name
                begun = time.monotonic()
                add_node(cluster, _EACH)
                wrong += not torch.equal(model.generate(ids, max_new_tokens=20, timeout=_RESTART_SECONDS), expected)
                restart_seconds.append(time.monotonic() - begun)
                while any(map(is_running, pids)) and time.monotonic() < begun + _LEFT_SECONDS:
                    time.sleep(0.05)
                left += sum(map(is_running, pids))
    return [
        Figure("seconds from the end of a node to the error", "max", 5.0, error_seconds),
        Figure("errors that do not name the host, or none", "sum", 0, [unnamed]),
        Figure("wrong answers afterwards", "sum", 0, [wrong]),
        Figure("ranks that are left after 5 s", "sum", 0, [left]),
        Figure("seconds until an answer, the new node's start among them", "max", _RESTART_SECONDS, restart_seconds),
    ]
