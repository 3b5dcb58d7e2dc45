"""Replicas on Ray Serve: the only file that imports ray.

Serve places replicas, starts others where they end, replaces them one after the other and scales them. A front asks
the replica that it names (``Pinned``) where it listens, and whether it would end; all else that both say goes over the
connection that the front then opens (``fleet.link``). Serve's HTTP proxy is not started.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import time
import warnings
from collections.abc import Iterable
from typing import Any

from jserve.config import EngineConfig, FleetOptions, ServerOptions
from jserve.errors import ConfigError, EngineDead
from jserve.fleet import membership
from jserve.fleet.host import EngineHost
from jserve.fleet.link import Endpoint, FrontClient
from jserve.fleet.serve_policy import ServePolicy
from jserve.fleet.source import OnChange

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Of a Ray that we start. By itself it gives its workers niceness 15: a replica then waits for whatever else there is.
os.environ.setdefault("RAY_worker_niceness", "0")
# Serve looks ten times a second for replicas to start or stop, 4 % of a core, all the time.
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.serve.config import (  # pyright: ignore[reportMissingImports]
        AutoscalingConfig,
        AutoscalingPolicy,
        RequestRouterConfig,
    )
    from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
        RayServeException,
    )
    from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
        PendingRequest,
        RequestRouter,
        RunningReplica,
    )
    from ray.serve.schema import ApplicationStatus  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(
        f"replicas needs Ray Serve ({error}): pip install 'jserve[ray]'", field="replicas"
    ) from None

log = logging.getLogger(__name__)

DEPLOYMENT = "engine"
BUILD = "jserve.build:engine"
NOT_STARTED = re.compile(r"EngineDead: the engine did not start: (.+)")
"""As ``fleet.host`` says it."""
HEALTH_S, HEALTH_TIMEOUT_S = 2.0, 30.0
"""Serve asks a replica for its health so often, and replaces one that has not answered thrice."""
TOLD_S = 30.0
"""Between two log lines of a front that waits for replicas."""
LOADS_S = 2.0
"""Replicas tell Serve of their load so often."""
OBJECT_STORE_BYTES = 128 << 20
"""Of a Ray that we start: no item of ours is large enough to lie there."""


class Pinned(RequestRouter):
    """Serve's router of our calls: to the replica that their first argument names."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        membership.tell(self.app_name, [one.unique_id for one in self.curr_replicas])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return []
        pending_request.routing_context.should_backoff = True  # else it asks again at once
        name = pending_request.args[0]
        return [[one for one in candidate_replicas if one.replica_id.unique_id == name]]


class RayHost(EngineHost):
    """A replica, which fronts find at the address that its machine has for Ray."""

    def __init__(self, config: dict[str, Any], build: str) -> None:
        super().__init__(config, build, ray.util.get_node_ip_address())


def application(args: dict[str, Any]) -> Any:
    """The Serve application of replicas with these options, by their flat names, for whoever deploys it instead of a
    front (``import_path`` of a config file of Serve). What a replica needs of a machine is for that file to say.

    Raises:
        ConfigError: as ``EngineConfig.of``.
    """
    return _bound(EngineConfig.of(**args), BUILD)


def _bound(
    config: EngineConfig,
    build: str,
    autoscaler: dict[str, float] | None = None,
    resources: dict[str, float] | None = None,
) -> Any:
    """The deployment of replicas, with its arguments: the options that replicas are made of, since Serve replaces those
    that have others."""
    own = dataclasses.replace(config, fleet=FleetOptions(), server=ServerOptions())
    deployment: Any = serve.deployment(RayHost)
    return deployment.options(
        name=DEPLOYMENT,
        **_numbers(config.fleet, autoscaler or {}),
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=10.0,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=_path(Pinned)),
    ).bind(own.flat(), build)


def _numbers(options: FleetOptions, autoscaler: dict[str, float]) -> dict[str, Any]:
    if options.max_replicas <= options.replicas:
        return {"num_replicas": options.replicas}
    with warnings.catch_warnings():
        # metrics_interval_s, in whose place Ray has an environment variable of each replica
        warnings.simplefilter("ignore", DeprecationWarning)
        scaling = AutoscalingConfig(
            min_replicas=options.replicas,
            initial_replicas=options.replicas,
            max_replicas=options.max_replicas,
            metrics_interval_s=LOADS_S,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(policy_function=_path(ServePolicy), policy_kwargs=autoscaler),
        )
    return {"autoscaling_config": scaling}


class RayReplicas:
    """A ``ReplicaSource``: a Serve application of one deployment, its own or that of option ``ray_application``.

    Args:
        config: options of all engines; ``config.fleet`` says how many and where.
        build: ``module:function`` of an ``engine.process.Build``, found in the replicas' Python path.
        app: name of the application; one of that name is replaced replica by replica.
        autoscaler: arguments of the ``Autoscaler`` that says when more are needed.
    """

    def __init__(
        self,
        config: EngineConfig,
        build: str,
        app: str = "jserve",
        autoscaler: dict[str, float] | None = None,
    ) -> None:
        self._config, self._build = config, build
        self._app = config.fleet.ray_application or app
        self._autoscaler = autoscaler or {}
        self._handle: Any = None
        self._ours = False

    @property
    def n(self) -> int:
        return self._config.fleet.replicas

    @property
    def scales(self) -> bool:
        return self._config.fleet.max_replicas > self.n

    async def start(self, on_change: OnChange) -> None:
        loop = asyncio.get_running_loop()

        def changed(names: Iterable[str]) -> None:
            loop.call_soon_threadsafe(on_change, list(names))

        await asyncio.to_thread(self._connect, self._config.fleet)
        membership.WATCHERS[self._app] = changed
        await self.deploy(self._config)

    async def deploy(self, config: EngineConfig) -> None:
        """Have Serve run the replicas of ``config`` in place of those of now, and wait until they do: started or
        stopped where their number differs, replaced one after the other where their options do.

        Raises:
            EngineDead: they do not start.
        """
        self._config = config
        try:
            theirs = config.fleet.ray_application
            handle = await (
                self._attach() if theirs else asyncio.to_thread(self._deploy, config.fleet)
            )
        except RuntimeError as error:
            why = await asyncio.to_thread(self._reason)
            raise EngineDead(f"the replicas did not start: {why or error}") from None
        if self._handle is None:
            self._handle = handle.options(stream=False)  # which makes its router

    def client(self, name: str) -> FrontClient:
        async def endpoint() -> Endpoint:
            return Endpoint(*await self._handle.endpoint.remote(name))

        return FrontClient(endpoint)

    async def retire(self, name: str) -> None:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._handle.retire.remote(name)
        except Exception as error:
            raise EngineDead(f"it does not answer: {type(error).__name__}") from None

    async def close(self) -> None:
        membership.WATCHERS.pop(self._app, None)
        if ray.is_initialized():
            await asyncio.to_thread(self._end)

    def _connect(self, options: FleetOptions) -> None:
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        try:
            if options.ray_address:
                ray.init(address=options.ray_address, namespace="jserve", **quiet)
                return
            _listen_here_only()
            ray.init(
                address="local",
                namespace="jserve",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
            self._ours = True
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray at {options.ray_address}: {error}", field="ray_address"
            ) from None

    def _deploy(self, options: FleetOptions) -> Any:
        serve.start(proxy_location="Disabled")
        bound = _bound(self._config, self._build, self._autoscaler, self._resources())
        return serve.run(bound, name=self._app, route_prefix=None)

    async def _attach(self) -> Any:
        """The handle of somebody else's application, once it runs.

        Raises:
            RuntimeError: it cannot be deployed.
        """
        told = 0.0
        while (status := await asyncio.to_thread(self._status)) != ApplicationStatus.RUNNING:
            if status == ApplicationStatus.DEPLOY_FAILED:
                raise RuntimeError("the deployment failed")
            if time.monotonic() - told > TOLD_S:
                told = time.monotonic()
                log.info("waiting for Serve's application %s: %s", self._app, status or "not there")
            await asyncio.sleep(1.0)
        return serve.get_app_handle(self._app)

    def _status(self) -> str:
        """Empty: there is no such application yet."""
        try:
            app = serve.status().applications.get(self._app)
        except RayServeException:  # Serve has not begun
            app = None
        return "" if app is None else app.status.value

    def _reason(self) -> str:
        """The engine's own words, which Serve has at the end of a traceback; empty: it has none."""
        app = serve.status().applications.get(self._app)
        texts = [] if app is None else [each.message for each in app.deployments.values()]
        found = [NOT_STARTED.search(text) for text in texts]
        return next((match[1] for match in found if match is not None), "")

    def _resources(self) -> dict[str, Any]:
        """Of one replica: its GPUs where the cluster has some. On CPUs a replica takes what it finds."""
        if ray.cluster_resources().get("GPU"):
            return {"num_cpus": 1, "num_gpus": self._config.device.n_devices}
        return {"num_cpus": 0}

    def _end(self) -> None:
        if self._ours:
            serve.shutdown()
            ray.shutdown()
        elif not self._config.fleet.ray_application:
            serve.delete(self._app)


def _listen_here_only() -> None:
    """Let a Ray that is started now, and its processes, use the loopback address. Ray does so where it supports
    no clusters, and has no other switch for it."""
    from ray._private import ray_constants  # pyright: ignore[reportMissingImports]

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _path(thing: type) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"
