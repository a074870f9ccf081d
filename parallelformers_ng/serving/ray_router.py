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
    """Router in a Ray Serve proxy that sends each request to the replica with the fewest requests from this proxy.

    Ray Serve's own router prefers replicas on the proxy's host. That router also uses outdated request counts, so that
    simultaneous requests go to the same replica. Ray Serve calls all methods of this class.
    """

    def initialize_state(self) -> None:
        """Initialize the router; Ray Serve calls this method once, in the place of `__init__`."""
        self._open_requests: dict[str, tuple[Any, Any]] = {}  # request id → (replica id, future of the routing)

    async def choose_replicas(self, candidate_replicas: Sequence[Any], pending_request: Any = None) -> list[Any]:
        """Return two groups of replicas to try in turn: the replica with the fewest open requests, then all others.

        Replicas with equally many requests are in random order. The request counts as sent to the first replica until
        `on_request_routed` is called.
        """
        requests = self._open_requests.items()
        self._open_requests = {request: routed for request, routed in requests if not routed[1].cancelled()}
        counts = Counter(replica for replica, _ in self._open_requests.values())
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        first, *others = sorted(shuffled, key=lambda each: counts[each.replica_id])
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Ray Serve waits before it asks again
            self._open_requests[pending_request.metadata.internal_request_id] = first.replica_id, pending_request.future
        return [[first], others]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record the replica that accepted the request; it is not the first choice if that replica was full."""
        request = pending_request.metadata.internal_request_id
        if request in self._open_requests:  # a request that has completed already is not in the table
            self._open_requests[request] = replica_id, pending_request.future

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Stop counting a request that was answered or has failed."""
        self._open_requests.pop(internal_request_id, None)
