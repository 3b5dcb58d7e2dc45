"""Gives replicas with roles what pages travel through: a directory on each machine, and doors between machines."""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import shutil
from pathlib import Path

from jserve.config import EngineConfig
from jserve.errors import ConfigError

MEMORY = Path("/dev/shm")
"""A directory in memory, where the system has one."""
HOST_GB = 1.0
SHARE = 0.5
"""Of what is free in ``MEMORY``, for the pages of all replicas."""
ANY_ADDRESS = "0.0.0.0:0"


def with_shared_pages(config: EngineConfig) -> EngineConfig:
    """``config`` of replicas with roles, with a directory, host memory and doors where it names none. The directory
    is removed when this process ends.

    Raises:
        ConfigError: an option that pages cannot travel with.
    """
    cache = config.cache
    if not cache.prefix_caching:
        raise ConfigError(
            "roles hand over pages that are found by their prefix: prefix_caching is off",
            field="prefix_caching",
        )
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
    if config.fleet.ray_address and not cache.page_door:
        changes["page_door"] = ANY_ADDRESS
    if (cache.page_door or "page_door" in changes) and not cache.page_door_key:
        changes["page_door_key"] = secrets.token_hex(16)
    return dataclasses.replace(config, cache=dataclasses.replace(cache, **changes))  # type: ignore[arg-type]
