"""Fixtures that all tests share, above all worker groups: the start of a group takes seconds, its use milliseconds."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelformers_ng import start_group
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.preload import IMPORTS
from tests.helpers.apart import find_packages
from tests.helpers.quick import quick_tests
from tests.helpers.rank_group import RankGroup

torch.set_num_threads(1)
# Processes started in a shell's background ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST = (
    "zoo",
    "runtime_group",
    "runtime_faults",
    "fork_server",
    "groups",
    "twins",
    "chaos",
    "methods",
    "pretended_step_kernels",
    "pretended_batching",
    "lora",
    "page",
    "faults_scripts",
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the separately installed packages importable, because pytest-xdist's controller rebuilds warnings of all
    packages."""
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        find_packages()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `quick.txt`. Sort the longest files first, so that two processes sharing the files end
    together."""
    table = quick_tests()
    for item in items:
        file, _, case = item.nodeid.removeprefix("tests/").partition("::")
        names = {*map(str, Path(file).parents), file, f"{file}::{case.partition('[')[0]}", f"{file}::{case}"}
        if not names.isdisjoint(table) and item.get_closest_marker("slow") is None:
            item.add_marker("quick")
    order = {f"test_{name}.py": number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def groups() -> Iterator[Callable[[int], WorkerGroup]]:
    """Yield `groups(world_size)`: a running CPU group of that size without a model, started if none exists."""
    running: list[WorkerGroup] = []

    def get(world_size: int) -> WorkerGroup:
        for group in running:
            if group.world_size == world_size and group.alive and not group.in_use:
                return group
        running.append(start_group(world_size, device="cpu", timeout=60))
        return running[-1]

    yield get
    for group in running:
        group.close()


@pytest.fixture(scope="session")
def _pretended() -> Iterator[dict[int, WorkerGroup]]:
    running: dict[int, WorkerGroup] = {}
    yield running
    for group in running.values():
        group.close()


@pytest.fixture
def pretended_groups(
    _pretended: dict[int, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], WorkerGroup]:
    """Return `pretended_groups(world_size)`: ranks on pretended CUDA devices, shared by all tests."""
    from tests.pretend_cuda.caller import TARGET, believe

    believe(monkeypatch)

    def get(world_size: int) -> WorkerGroup:
        if world_size not in _pretended or not _pretended[world_size].alive:
            _pretended[world_size] = WorkerGroup(world_size, "cuda", target=TARGET, imports=IMPORTS, timeout=60)
        return _pretended[world_size]

    return get


@pytest.fixture
def pretended(pretended_groups: Callable[[int], WorkerGroup]) -> WorkerGroup:
    """Return two ranks on pretended devices."""
    return pretended_groups(2)


@pytest.fixture
def pretended_one(pretended_groups: Callable[[int], WorkerGroup]) -> WorkerGroup:
    """Return one rank on a pretended device, for tests independent of the number of ranks."""
    return pretended_groups(1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the parts of a decode step computed in C during a test."""
    from tests.helpers.step_models import count_calls  # a slow import that most tests do not need

    return count_calls(monkeypatch)


@pytest.fixture(scope="module", params=(1, 2, 3, 4, 5), ids=lambda size: f"ranks{size}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Yield processes for collectives, of each world size in turn."""
    group = RankGroup(request.param)
    yield group
    group.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankGroup]:
    """Yield two processes for collectives."""
    group = RankGroup(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def tiny_whole() -> Any:
    """Return the tiny model of the tests' servers, in this process."""
    from tests.helpers.server import tiny_model, tiny_tokenizer

    return tiny_model(tiny_tokenizer())


@pytest.fixture(scope="module")
def http(groups: Callable[[int], WorkerGroup]) -> Iterator[Any]:
    """Yield a client of a server with the tiny model on two ranks."""
    from tests.helpers.server import serving_on, tiny_tokenizer

    with serving_on(groups(2), tiny_tokenizer()) as running, running.client() as client:
        yield client
