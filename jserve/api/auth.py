"""API keys: who may use which route.

Owns the check of ``Authorization: Bearer`` and ``x-api-key``. Only SHA-256 digests stay in memory;
every digest is compared, in constant time and on bytes, so that timing tells nothing. Must not know
endpoints: each route declares its access level where it is added.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from enum import StrEnum

from jserve.errors import Unauthorized

TENANT_HEX = 16
"""Enough of a digest to tell keys apart, too little to try keys against in secret."""


class Access(StrEnum):
    """Who may call a route when keys are set. ``ADMIN`` routes are off for now."""

    OPEN = "open"
    USER = "user"
    ADMIN = "admin"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The keys that open the USER routes; with none set these are open to everyone."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys if key)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Mapping[str, str]) -> str:
        """The tenant: ``TENANT_HEX`` digits of the key's digest, "" where no keys are set.

        Raises:
            Unauthorized: keys are set and the headers hold none of them.
        """
        if not self._digests:
            return ""
        given = _digest(_presented(headers))
        hits = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(hits):
            raise Unauthorized("a valid API key is required")
        return given.hex()[:TENANT_HEX]

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Who asks: a name derived from the key, "" for everyone while no keys are set."""
        return _digest(_presented(headers)).hex()[:16] if self._digests else ""


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()
