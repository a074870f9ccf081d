"""Worker groups shared by all tests: starting one costs seconds, using one milliseconds."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from parallelformers_ng import start_group
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.preload import IMPORTS
from tests.helpers.apart import find_packages
from tests.helpers.rank_group import RankGroup

torch.set_num_threads(1)
# A shell that starts the tests in the background has them and all that they start ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST = (
    "zoo",
    "servers",
    "runtime_group",
    "runtime_faults",
    "fork_server",
    "groups",
    "twins",
    "chaos",
    "methods",
)


def pytest_configure(config: pytest.Config) -> None:
    """Create again the warnings of any package that pytest-xdist sends between processes."""
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        find_packages()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first, so that two processes that share the files end together."""
    order = {f"test_{name}.py": number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def groups() -> Iterator[Callable[[int], WorkerGroup]]:
    """`groups(world_size)`: a CPU group of that size that runs and serves no model, started where there is none."""
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
    """`pretended_groups(world_size)`: ranks on pretended CUDA devices, which serve one test after another."""
    from tests.pretend_cuda.caller import TARGET, believe

    believe(monkeypatch)

    def get(world_size: int) -> WorkerGroup:
        if world_size not in _pretended or not _pretended[world_size].alive:
            _pretended[world_size] = WorkerGroup(world_size, "cuda", target=TARGET, imports=IMPORTS, timeout=60)
        return _pretended[world_size]

    return get


@pytest.fixture
def pretended(pretended_groups: Callable[[int], WorkerGroup]) -> WorkerGroup:
    """Two of them."""
    return pretended_groups(2)


@pytest.fixture
def pretended_one(pretended_groups: Callable[[int], WorkerGroup]) -> WorkerGroup:
    """One, for what has nothing to do with the number of ranks."""
    return pretended_groups(1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a test has the parts of a decode step computed in C."""
    from tests.helpers.step_models import count_calls  # it takes a second, which most tests need not wait

    return count_calls(monkeypatch)


@pytest.fixture(scope="module", params=(1, 2, 3, 4, 5), ids=lambda size: f"ranks{size}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Processes for collectives, of each world size in turn."""
    group = RankGroup(request.param)
    yield group
    group.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankGroup]:
    """Two processes for collectives."""
    group = RankGroup(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def tiny_whole() -> Any:
    """The tiny model that servers of tests have, in this process."""
    from tests.helpers.server import tiny_model, tiny_tokenizer

    return tiny_model(tiny_tokenizer())


@pytest.fixture(scope="module")
def http(groups: Callable[[int], WorkerGroup]) -> Iterator[Any]:
    """A client of a server that has the tiny model on two ranks."""
    from tests.helpers.server import serving_on, tiny_tokenizer

    with serving_on(groups(2), tiny_tokenizer()) as running, running.client() as client:
        yield client
