"""Knows which replica has which named cache: it is where it was made, and gone with it."""

from __future__ import annotations

from jserve.errors import CacheNotFound, shown
from jserve.fleet.member import Member

MOST = 1 << 16
"""Names that are kept; those that expired are among them."""


class HandlePlaces:
    """Replicas by tenant and name of a cache."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], Member] = {}

    def find(self, tenant: str, name: str) -> Member:
        """The replica that has the cache. Raises CacheNotFound."""
        found = self._places.get((tenant, name))
        if found is None:
            raise CacheNotFound(f"there is no cache {shown(name)}", field="cache")
        return found

    def make(self, tenant: str, name: str, members: list[Member]) -> Member:
        """The replica that is to have it: the one that has a cache of that name, or the emptiest."""
        found = self._places.get((tenant, name))
        if found is None:
            found = self._places[tenant, name] = min(members, key=lambda one: one.n_open)
            if len(self._places) > MOST:
                del self._places[next(iter(self._places))]
        return found

    def drop(self, tenant: str, name: str) -> None:
        """It is no more."""
        self._places.pop((tenant, name), None)

    def leave(self, member: Member) -> None:
        """``member`` is gone, with all that it has."""
        for key in [key for key, one in self._places.items() if one is member]:
            del self._places[key]
