"""Makes the engine of several replicas that the options ask for."""

from __future__ import annotations

from typing import Any

from jserve.config import EngineConfig
from jserve.engine.kv_events import check_named, check_replicas
from jserve.errors import ConfigError
from jserve.fleet.face import FleetEngine
from jserve.fleet.role_control import RoleControl
from jserve.fleet.roles import AUTO, parse_roles
from jserve.fleet.shared_pages import with_shared_pages


def fleet_engine(config: EngineConfig, build: str, **options: Any) -> FleetEngine:
    """``config.fleet.replicas`` engines on Ray Serve; ``options`` are those of ``FleetEngine``.

    Args:
        build: as of ``RayReplicas``.

    Raises:
        ConfigError: Ray Serve is not installed, or an option cannot be honoured.
    """
    from jserve.fleet.on_ray import RayReplicas

    check(config)
    roles = parse_roles(config.fleet.roles, config.fleet.replicas)
    if roles:
        config = with_shared_pages(config)
    replicas = RayReplicas(config, build)
    fleet = config.fleet
    return FleetEngine(
        replicas,
        policy=fleet.router,
        roles=roles,
        role_control=RoleControl() if fleet.roles == AUTO else None,
        hedge_share=fleet.hedge_share,
        audit_share=fleet.audit_share,
        **options,
    )


def check(config: EngineConfig) -> None:
    """Raises ConfigError for options that replicas, or they together, cannot honour."""
    options = config.fleet
    cache = config.cache
    check_named(cache)
    if cache.kv_events:
        most = max(options.replicas, options.max_replicas)
        check_replicas(cache.kv_events, cache.kv_events_replay, most)
    if options.max_replicas and options.max_replicas < options.replicas:
        raise ConfigError("max_replicas must not be below replicas", field="max_replicas")
    if options.ray_application and not options.ray_address:
        why = f"ray_application {options.ray_application} is on a cluster: ray_address is missing"
        raise ConfigError(why, field="ray_address")
    if options.ray_application and options.roles:
        why = "roles need replicas that share pages, which only this server can deploy"
        raise ConfigError(f"{why}: there is ray_application", field="roles")
    if options.max_replicas > options.replicas and options.roles:
        raise ConfigError("the number of replicas with roles is fixed", field="max_replicas")
