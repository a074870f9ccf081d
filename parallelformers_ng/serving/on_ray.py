"""Runs the server on Ray Serve, with several replicas behind one address.

The router sends each request to the replica with the fewest requests. Ray Serve scales the number of replicas and
replaces unhealthy replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from parallelformers_ng.errors import ParallelError, StartupError, did_you_mean
from parallelformers_ng.hosts.ray import Connection
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.options import RayOptions
from parallelformers_ng.serving import ray_router
from parallelformers_ng.serving.app import create_app
from parallelformers_ng.serving.logs import log
from parallelformers_ng.serving.model_kinds import kind_of
from parallelformers_ng.serving.run import load
from parallelformers_ng.serving.serve_options import ServeOptions

_NAME = "parallelformers_ng"


class ServedReplica:
    """Replica of the server on Ray Serve, with its own model. Its ranks end when the object is deleted."""

    def __init__(self, options: ServeOptions) -> None:
        kind = kind_of(options.model, options.revision)
        self._model, tokenizer = load(options, kind)
        self._app = create_app(self._model, tokenizer, options, kind)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def check_health(self) -> None:
        """Raise an error if the ranks do not answer. After repeated errors, Ray Serve replaces the replica."""
        await asyncio.to_thread(deployment_of(self._model).ping)

    def __del__(self) -> None:
        if hasattr(self, "_model"):
            deployment_of(self._model).close()


@contextlib.contextmanager
def deployed(options: ServeOptions) -> Iterator[str]:
    """Deploy the server on a Ray cluster, yield its URL, and delete the server when the block ends.

    If the cluster then has no other application of Ray Serve, the function also shuts down Ray Serve.
    """
    if options.client_timeout != ServeOptions.client_timeout:
        why = "client_timeout has no effect with launcher 'ray', because Ray Serve's proxy holds connections; remove it"
        raise ParallelError(why)
    if not options.port:
        raise ParallelError("port is 0; with launcher 'ray', set a port from 1 to 65535")
    if options.autoscaling and options.replicas != ServeOptions.replicas:
        why = f"replicas is {options.replicas}, but autoscaling sets the number of replicas; remove one of the options"
        raise ParallelError(why)
    scale = _scale(options)
    with contextlib.closing(Connection(RayOptions(address=options.ray_address))):
        serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port})
        try:
            deployment = serve.deployment(serve.ingress()(ServedReplica)).options(
                **scale,
                ray_actor_options={"num_cpus": 0},  # the ranks reserve CPUs and GPUs in a placement group
                max_ongoing_requests=options.rows + options.waiting,
                request_router_config=RequestRouterConfig(request_router_class=f"{ray_router.__name__}:FewestRequests"),
                graceful_shutdown_timeout_s=options.drain,
            )
            try:
                serve.run(deployment.bind(options), name=_NAME, route_prefix="/")
            except RuntimeError as error:
                raise StartupError(f"Ray Serve cannot start the server: {error}") from error
            yield f"http://{options.host}:{options.port}"
        finally:
            if ray.is_initialized():
                serve.delete(_NAME)
                if not serve.status().applications:
                    serve.shutdown()


def serve_on_ray(options: ServeOptions) -> int:
    """Serve until SIGTERM or Ctrl-C. The function must run in the main thread, because it sets signal handlers."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with deployed(options) as address:
        key = "a key" if options.api_key else "no key"
        log.info("serving %s on %s with %s, on Ray with %s", options.name, address, key, _scale(options))
        ended.wait()
        log.info("shutting down; running requests may complete")
    return 0


def _scale(options: ServeOptions) -> dict[str, Any]:
    if not options.autoscaling:
        return {"num_replicas": options.replicas}
    words = (word.split("=") for word in options.autoscaling)  # `ServeOptions` checks that each is NAME=NUMBER
    settings = {name: int(value) if value.isdecimal() else float(value) for name, value in words}
    for name in settings:
        if name not in AutoscalingConfig.model_fields:  # Ray Serve would silently ignore an unknown name
            hint = did_you_mean(name, AutoscalingConfig.model_fields)
            raise ParallelError(f"autoscaling has {name!r}, which is not a setting of Ray Serve{hint}")
    try:
        AutoscalingConfig(**settings)
    except ValueError as error:
        raise ParallelError(f"autoscaling is {settings}, which Ray Serve refuses: {error}") from None
    return {"autoscaling_config": settings}
