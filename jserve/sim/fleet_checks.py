"""Refuses settings of a simulation that make no sense for several engines."""

from __future__ import annotations

from jserve.errors import ConfigError
from jserve.fleet.router import POLICIES
from jserve.fleet.shared_pages import check_shares_pages
from jserve.sim.simulate import Setup


def check_fleet(setup: Setup) -> None:
    """Raises ConfigError for no such router, static batching, which is of one engine, or roles that other options
    exclude."""
    if setup.router not in POLICIES:
        raise ConfigError(f"router must be one of {', '.join(POLICIES)}", field="router")
    if setup.batching != "continuous":
        raise ConfigError("static batching is simulated for one engine", field="batching")
    if setup.roles:
        _check_roles(setup)


def _check_roles(setup: Setup) -> None:
    check_shares_pages(setup.config.cache)
    if setup.max_replicas > setup.replicas:
        raise ConfigError("the number of replicas with roles is fixed", field="max_replicas")
    if setup.transfer_gb_s and not setup.device.page_bytes:
        why = f"{setup.device.name} does not say how large a page is"
        raise ConfigError(f"transfer_gb_s: {why}", field="transfer_gb_s")
