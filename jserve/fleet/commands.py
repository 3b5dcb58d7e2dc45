"""Commands to several replicas: those that all carry out, and those to the one that has a named cache.

A cache is where it was made, and gone with its replica.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from jserve.engine.wire import Control, HandleCommand, HandleReply
from jserve.errors import BadRequest, CacheNotFound, shown
from jserve.fleet.member import Member
from jserve.types import HandleInfo

FOR_ALL = ("reset_prefix_cache", "start_profile", "stop_profile", "pause", "resume", "weight_info")
"""Commands that all replicas carry out. Of the others a replica that takes another's place would know nothing."""
MOST = 1 << 16
"""Names that are kept; those that expired are among them."""


def check_for_all(message: Control) -> None:
    """Raises BadRequest for a command that is of one engine."""
    if message.action not in FOR_ALL:
        raise BadRequest(f"{message.action} is of one engine; there are replicas", field="action")


class HandlePlaces:
    """Replicas by tenant and name of a cache."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], Member] = {}

    @property
    def places(self) -> Iterable[Member]:
        """The replicas that have caches."""
        return self._places.values()

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

    async def ask(
        self, message: HandleCommand, ask: Callable[[Member, HandleCommand], Awaitable[HandleReply]]
    ) -> list[HandleInfo]:
        """Put ``message`` to the replica that has its cache. Raises CacheNotFound, and what ``ask`` raises."""
        name, gone = message.name or "", message.action == "drop"
        member = self.find(message.tenant, name)
        try:
            return (await ask(member, message)).handles
        except CacheNotFound:
            gone = True
            raise
        finally:
            if gone:
                self.drop(message.tenant, name)

    def drop(self, tenant: str, name: str) -> None:
        """It is no more."""
        self._places.pop((tenant, name), None)

    def leave(self, member: Member) -> None:
        """``member`` is gone, with all that it has."""
        for key in [key for key, one in self._places.items() if one is member]:
            del self._places[key]
