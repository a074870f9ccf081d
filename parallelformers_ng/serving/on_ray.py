"""The server on Ray Serve: replicas behind one route. Serve asks the replica with the fewest requests, scales by its
settings, and replaces unhealthy replicas."""

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
from parallelformers_ng.serving.model_kinds import kind_of
from parallelformers_ng.serving.run import load, say
from parallelformers_ng.serving.serve_options import ServeOptions

_NAME = "parallelformers_ng"


class ServedReplica:
    """One replica: the caller of its ranks, which lie on the cluster if there is room for them.

    Args:
        options: options of the server.
    """

    def __init__(self, options: ServeOptions) -> None:
        kind = kind_of(options.model, options.revision)
        self._model, tokenizer = load(options, kind)
        self._app = create_app(self._model, tokenizer, options, kind)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def check_health(self) -> None:
        """Do the check of `/ready`: every rank has answered to the others."""
        await asyncio.to_thread(deployment_of(self._model).ping)

    def __del__(self) -> None:
        if hasattr(self, "_model"):
            deployment_of(self._model).close()


@contextlib.contextmanager
def deployed(options: ServeOptions) -> Iterator[str]:
    """The server on a cluster, ready; within the block it serves at this address.

    Raises:
        ParallelError: an option does not act on Ray, or is none of Serve's.
        StartupError: there is no such cluster.
    """
    _refuse_what_does_not_act(options)
    scale = _scale(options)
    with contextlib.closing(Connection(RayOptions(address=options.ray_address))):
        serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port})
        try:
            deployment = serve.deployment(serve.ingress()(ServedReplica)).options(
                **scale,
                ray_actor_options={"num_cpus": 0},  # the ranks have bundles of their own
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
    """Serve until told to end. Returns the exit status; raises what `deployed` does."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with deployed(options) as address:
        key = "a key" if options.api_key else "no key"
        say(f"serving {options.name} on {address} with {key}: on Ray, {_scale(options)}")
        ended.wait()
        say("ending: requests in flight may complete")
    return 0


def _scale(options: ServeOptions) -> dict[str, Any]:
    """Return how many replicas, in the words of Serve's."""
    if not options.autoscaling:
        return {"num_replicas": options.replicas}
    settings: dict[str, float] = {}
    for word in options.autoscaling:
        name, _, value = word.partition("=")
        try:
            settings[name] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise ParallelError(
                f"autoscaling has {word!r}; it takes NAME=NUMBER, as in min_replicas=1 max_replicas=4"
            ) from None
    for name in settings:
        if name not in AutoscalingConfig.model_fields:  # which Serve would drop
            hint = did_you_mean(name, AutoscalingConfig.model_fields)
            raise ParallelError(f"autoscaling has {name!r}, which Ray Serve does not take{hint}")
    try:
        AutoscalingConfig(**settings)
    except ValueError as error:
        raise ParallelError(f"autoscaling is {settings}, which Ray Serve does not take: {error}") from None
    return {"autoscaling_config": settings}


def _refuse_what_does_not_act(options: ServeOptions) -> None:
    if options.client_timeout != ServeOptions.client_timeout:
        raise ParallelError("client_timeout does not act with launcher 'ray': connections are those of Serve's proxy")
    if not options.port:
        raise ParallelError("port is 0; Ray Serve takes a number from 1 to 65535")
    if options.autoscaling and options.replicas != ServeOptions.replicas:
        raise ParallelError(f"replicas is {options.replicas}, and autoscaling says how many; leave one of them out")
