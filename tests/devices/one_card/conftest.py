"""Provides the place in which a test runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.devices.one_card.place import Place, sharing_a_card


@pytest.fixture(scope="session")
def _places() -> Iterator[dict[str, Place]]:
    places: dict[str, Place] = {}
    yield places
    for place in places.values():
        place.close()


@pytest.fixture
def place(request: pytest.FixtureRequest, _places: dict[str, Place]) -> Iterator[Place]:
    """Yield one device that ranks share over NCCL, a card or a pretended device. Its groups outlive the test."""
    from tests.pretend_cuda.caller import believe  # imports of the stand-in are slow

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pretended":
            believe(patch)
        with sharing_a_card():
            if request.param not in _places:
                _places[request.param] = Place()
            yield _places[request.param]
