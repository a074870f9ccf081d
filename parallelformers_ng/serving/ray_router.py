"""Chooses the replica for a request on Ray Serve. Serve's proxies import this, so it imports nothing else of this
package."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter


class FewestRequests(RequestRouter):
    """Asks the replica that has the fewest requests of this proxy, wherever it is.

    Serve's own router asks replicas on the host of its proxy first, as long as they take more; and it goes by what
    replicas said of themselves the last time, so that requests that come together go to one of them.
    """

    def initialize_state(self) -> None:
        """Serve calls this once."""
        self._asked: dict[str, tuple[Any, Any]] = {}  # request → its replica, and the future of its way there

    async def choose_replicas(
        self, candidate_replicas: Sequence[Any], pending_request: Any = None
    ) -> list[Sequence[Any]]:
        """Return the one to ask, and the others for the case that it is full."""
        self._asked = {request: sent_to for request, sent_to in self._asked.items() if not sent_to[1].cancelled()}
        counts = Counter(replica for replica, _ in self._asked.values())
        first, *others = sorted(
            random.sample(candidate_replicas, len(candidate_replicas)), key=lambda each: counts[each.replica_id]
        )
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all are full
            self._asked[pending_request.metadata.internal_request_id] = first.replica_id, pending_request.future
        return [[first], others]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Note the replica that has taken the request; another one if the first was full."""
        request = pending_request.metadata.internal_request_id
        if request in self._asked:  # else it has been answered by now
            self._asked[request] = replica_id, pending_request.future

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """It has been answered, or has failed."""
        self._asked.pop(internal_request_id, None)
