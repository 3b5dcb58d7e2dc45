"""API keys: authenticates tenants and authorises routes.

It owns the check of ``Authorization: Bearer`` and ``x-api-key`` and the file of tenants. Only SHA-256 digests stay
in memory; every digest is compared, in constant time and on bytes, so that timing leaks nothing.

The file is YAML (or JSON), a list of tenants; keys are given by digest, never in the clear::

    - tenant: team-a
      keys: ["sha256:2bb80d53..."]       # printf %s "$KEY" | sha256sum
      requests_per_minute: 600           # each limit may be left out
      tokens_per_minute: 200000
      concurrent: 16
    - tenant: operators
      keys: ["sha256:9f86d081..."]
      admin: true
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from jserve.api.http.quota import Quota
from jserve.errors import ConfigError, Unauthorized

TENANT_HEX = 16
"""Enough of a digest to tell keys apart, too little to try keys against in secret."""
_NAME = re.compile(r"[A-Za-z0-9._\-]{1,64}")
_KEY = re.compile(r"sha256:[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")


class Access(StrEnum):
    """The keys that may call a route when keys are set. ``ADMIN`` routes have a port of their own."""

    OPEN = "open"
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whoever pays for a request. The default is everyone, while no keys are set."""

    name: str = ""
    admin: bool = False
    quota: Quota = field(default_factory=Quota)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The keys that open the USER routes; with none set these are open to everyone.

    Args:
        keys: keys in the clear, each a tenant of its own without limits.
        tenants: pairs of a key's digest and its tenant.
    """

    def __init__(self, keys: Iterable[str], tenants: Iterable[tuple[bytes, Tenant]] = ()) -> None:
        own = ((digest(key), Tenant(name=digest(key).hex()[:TENANT_HEX])) for key in keys if key)
        self._tenants = (*own, *tenants)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def any_admin(self) -> bool:
        return any(tenant.admin for _, tenant in self._tenants)

    def check(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of the key in the headers; the open tenant where no keys are set.

        Raises:
            Unauthorized: keys are set and the headers hold none of them.
        """
        if not self._tenants:
            return Tenant()
        given, found = digest(_presented(headers)), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(given, known):
                found = tenant
        if found is None:
            raise Unauthorized("a valid API key is required")
        return found


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def load_tenants(path: str) -> list[tuple[bytes, Tenant]]:
    """The digests and tenants of a keys file; "" is none.

    Raises:
        ConfigError: the file cannot be read, or an entry of it is wrong; the message says which.
    """
    if not path:
        return []
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"api_keys_file {path}: {e.strerror}", field="api_keys_file") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise _wrong("the file is not YAML") from None
    if not isinstance(entries, list) or not entries:
        raise _wrong("the file must hold a list of tenants")
    found = [pair for i, entry in enumerate(entries) for pair in _tenant(entry, f"entry {i}")]
    if len({key for key, _ in found}) < len(found):
        raise _wrong("a key is listed twice")
    return found


def _tenant(entry: Any, at: str) -> list[tuple[bytes, Tenant]]:
    if not isinstance(entry, dict):
        raise _wrong(f"{at} must be a mapping")
    unknown = sorted(str(name) for name in entry.keys() - {"tenant", "keys", "admin", *_LIMITS})
    if unknown:
        raise _wrong(f"{at} has an unknown field {unknown[0][:64]!r}")
    name, keys, admin = entry.get("tenant"), entry.get("keys"), entry.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{at}: tenant must be 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(keys, list) or not keys or not all(_is_digest(key) for key in keys):
        raise _wrong(f"{at}: keys must be a list of 'sha256:' and 64 hex digits each")
    if not isinstance(admin, bool):
        raise _wrong(f"{at}: admin must be true or false")
    limits = {limit: _limit(entry.get(limit), limit, at) for limit in _LIMITS}
    tenant = Tenant(name=name, admin=admin, quota=Quota(**limits))
    return [(bytes.fromhex(key.removeprefix("sha256:")), tenant) for key in keys]


def _is_digest(key: Any) -> bool:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def _limit(value: Any, name: str, at: str) -> int | None:
    if value is None or (type(value) is int and value > 0):
        return value
    raise _wrong(f"{at}: {name} must be a whole number above 0")


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"api_keys_file: {message}", field="api_keys_file")
