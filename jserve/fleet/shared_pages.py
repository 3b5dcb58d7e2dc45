"""Gives replicas with roles what KV pages travel through: a directory on each machine, and TCP between machines."""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import shutil
from pathlib import Path

from jserve.config import CacheOptions, EngineConfig
from jserve.errors import ConfigError

MEMORY = Path("/dev/shm")
"""A directory in memory, where the system has one."""
HOST_GB = 1.0
SHARE = 0.5
"""Of what is free in ``MEMORY``, for the pages of all replicas."""
ANY_ADDRESS = "0.0.0.0:0"


def check_shares_pages(cache: CacheOptions) -> None:
    """Raises ConfigError where replicas with these options cannot hand over pages."""
    if not cache.prefix_caching:
        raise ConfigError(
            "roles need pages that are found by their prefix: prefix_caching is off",
            field="prefix_caching",
        )


def with_shared_pages(config: EngineConfig) -> EngineConfig:
    """``config`` of replicas with roles, with a directory, host memory and KV transfer where it names none. The
    directory is removed on this machine when this process ends.

    Raises:
        ConfigError: an option that pages cannot travel with.
    """
    cache = config.cache
    check_shares_pages(cache)
    changes: dict[str, object] = {}
    if not cache.disk_dir:
        if not MEMORY.is_dir():
            raise ConfigError("roles need disk_dir: there is no /dev/shm", field="disk_dir")
        free_gb = shutil.disk_usage(MEMORY).free / 2**30
        most = SHARE * free_gb / max(1, config.fleet.replicas)
        directory = str(MEMORY / f"jserve-{os.getuid()}-{secrets.token_hex(4)}")
        # Files there take memory: with the front they have no use any more.
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        changes["disk_dir"] = directory
        changes["disk_gb"] = max(0.001, min(cache.disk_gb, most))
    if not cache.host_memory_gb:
        changes["host_memory_gb"] = HOST_GB
    if config.fleet.ray_address and not cache.kv_transfer_address:
        changes["kv_transfer_address"] = ANY_ADDRESS
    if (
        cache.kv_transfer_address or "kv_transfer_address" in changes
    ) and not cache.kv_transfer_key:
        changes["kv_transfer_key"] = secrets.token_hex(16)
    return dataclasses.replace(config, cache=dataclasses.replace(cache, **changes))  # type: ignore[arg-type]
