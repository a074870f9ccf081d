"""Chooses the replica for each request on Ray Serve.

Ray Serve's proxies import this file, so this file must not import other files of this package.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter


class FewestRequests(RequestRouter):
    """Router that sends each request to the replica with the fewest requests of this proxy, on any host.

    Ray Serve's own router prefers replicas on the proxy's host. That router also uses outdated request counts, so that
    simultaneous requests go to the same replica. The methods override or implement methods of Ray Serve's
    `RequestRouter`.
    """

    def initialize_state(self) -> None:
        """Create the table of open requests; Ray Serve calls this method once."""
        self._open_requests: dict[str, tuple[Any, Any]] = {}  # request → its replica, and the future of its routing

    async def choose_replicas(
        self, candidate_replicas: Sequence[Any], pending_request: Any = None
    ) -> list[Sequence[Any]]:
        """Return the replica with the fewest requests, then the other replicas for the case that the first is full.

        The order of replicas with equally many requests is random. The method counts the request at the first replica.
        If all replicas are full, the request waits.
        """
        requests = self._open_requests.items()
        self._open_requests = {request: routed for request, routed in requests if not routed[1].cancelled()}
        counts = Counter(replica for replica, _ in self._open_requests.values())
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        first, *others = sorted(shuffled, key=lambda each: counts[each.replica_id])
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait if all replicas are full
            self._open_requests[pending_request.metadata.internal_request_id] = first.replica_id, pending_request.future
        return [[first], others]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record the replica that accepted the request, which is another replica if the first choice was full."""
        request = pending_request.metadata.internal_request_id
        if request in self._open_requests:  # a request that is answered already is no longer in the table
            self._open_requests[request] = replica_id, pending_request.future

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Remove a request that was answered or has failed."""
        self._open_requests.pop(internal_request_id, None)
