"""Gives replicas other weights while they serve, one after the other: all of them, or a share first (a canary).

It owns the weights that each replica is to have, those of before, and which requests a canary gets. ::

    update     one replica at a time gets nothing new, updates as a single engine does, and is back
               one that cannot take them: those that did get the old ones back, and the command fails
    canary     only the youngest replicas; of new requests ``share`` go there, chosen by their ids
    promotion  the same update without a share: the others follow
    rollback   the weights of before, for a canary's replicas or for all
    joining    whoever joins is given what the others have before it gets a request
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jserve.engine.wire import Control, HandleReply
from jserve.errors import BadRequest, EngineDead, JserveError, WeightsError
from jserve.fleet.member import Member
from jserve.types import FIRST_WEIGHTS

UPDATES = ("update_weights", "rollback_weights")
RETRY_S = 5.0
"""Until a replica that could not be given what it is due is tried again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RolledOut:
    """Weights that replicas were given, as ``update_weights`` takes them."""

    source: str
    version: str


Ask = Callable[[Member, Control], Awaitable[HandleReply]]
"""The answer of a replica. Raises JserveError: it refuses; EngineDead: it is gone."""


class Rollout:
    """The weights of a fleet.

    Args:
        first: the model that replicas start with, as ``update_weights`` takes it.
        ask: as ``Ask``.
        weigh: hears that a replica began or ended an update.
    """

    def __init__(self, first: str, ask: Ask, weigh: Callable[[Member], None]) -> None:
        self._ask, self._weigh = ask, weigh
        self._first = self._stable = RolledOut(first, FIRST_WEIGHTS)
        self._before: RolledOut | None = None
        self._canary: RolledOut | None = None
        self._share, self._n_canaries = 0.0, 0
        self._given: dict[Member, RolledOut] = {}
        """Those that have others than they started with."""
        self._settled: set[Member] = set()
        """Those that have joined: the place of a canary that is gone is a newcomer's."""
        self._n_updates = 0
        self._lock, self._busy = asyncio.Lock(), False

    def check(self, command: Control, members: Seq[Member]) -> None:
        """Raises BadRequest for a command that these cannot carry out, or not now."""
        if self._busy:
            why = "not now: replicas are being given other weights"
            raise BadRequest(why, code="operation_pending", field="action")
        if command.action == "rollback_weights":
            if self._canary is None and self._before is None:
                raise BadRequest("there are no weights of before", field="action")
            return
        if not isinstance(command.source, str):
            why = "source: replicas take a directory, which all of them can read"
            raise BadRequest(why, field="source")
        for name in ("partial", "donate"):
            if getattr(command, name):
                raise BadRequest(f"{name} is of one engine; there are replicas", field=name)
        if not 0.0 <= command.share < 1.0:
            raise BadRequest("share must be at least 0 and below 1", field="share")
        if command.share and len(members) < 2:
            raise BadRequest("share: a canary needs two replicas", field="share")
        if command.share and self._canary is not None and not self._is_canary(command):
            why = "share: there is a canary; update without a share or roll back first"
            raise BadRequest(why, field="share")

    async def carry_out(self, command: Control, members: Seq[Member]) -> None:
        """Give ``members``, oldest first, the weights of ``command``, or those of before.

        Raises:
            BadRequest, WeightsError: they do not fit, or not now; all have what they had.
            EngineDead: no replica is left that could be given them.
        """
        self.check(command, members)
        self._busy = True
        try:
            async with self._lock:
                await self._carry_out(command, members)
        finally:
            self._busy = False

    def has(self, member: Member) -> RolledOut:
        """The weights that ``member`` has."""
        return self._given.get(member, self._first)

    def late(self, member: Member, members: Seq[Member]) -> bool:
        """``member``, one of ``members``, has other weights than it should, and ``catch_up`` is due. From now on it
        gets nothing new."""
        if member.updating or (self._busy and member in self._settled):
            return False
        if self._due(member, members) is None:
            self._settled.add(member)
            return False
        member.updating = True
        self._weigh(member)
        return True

    async def catch_up(self, member: Member, members: Callable[[], Seq[Member]]) -> None:
        """Give ``member`` the weights that it should have, and go on trying while it is one of ``members``."""
        while member in members():
            async with self._lock:
                weights = self._due(member, members())
                try:
                    if weights is not None:
                        await self._give(member, weights)
                    member.updating = False
                    self._weigh(member)
                    return
                except JserveError as error:
                    log.warning("replica %s lacks new weights: %s", member.name, error.message)
                    member.updating = True
                    self._weigh(member)
            await asyncio.sleep(RETRY_S)
        member.updating = False  # it may be one of them later

    def leave(self, member: Member) -> None:
        self._given.pop(member, None)
        self._settled.discard(member)

    @property
    def busy(self) -> bool:
        """Replicas are being given other weights at an operator's command."""
        return self._busy

    @property
    def splits(self) -> bool:
        """New requests go to one or the other weights by their ids."""
        return self._canary is not None

    def example(self, request_id: str, members: Seq[Member]) -> Member | None:
        """One of ``members`` that has the weights which are to answer a new request; None: nobody has them."""
        drawn = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        tried = self._canary is not None and int.from_bytes(drawn) < self._share * 2**64
        wanted = self._canary if tried else self._stable
        return next((one for one in members if self.has(one) is wanted), None)

    def info(self, members: Seq[Member]) -> dict[str, Any]:
        """Facts for an operator: the version of all, the canary's and its share, each replica's."""
        canary = self._canary and {"version": self._canary.version, "share": self._share}
        versions = {one.name: self.has(one).version for one in members}
        return {"version": self._stable.version, "canary": canary, "replicas": versions}

    async def _carry_out(self, command: Control, members: Seq[Member]) -> None:
        if command.action == "rollback_weights":
            await self._roll_back(members, command.running)
        elif command.share:
            await self._try(self._wanted(command), command, members)
        else:
            await self._replace(self._wanted(command), members, command.running)

    def _is_canary(self, command: Control) -> bool:
        canary = self._canary
        if canary is None or canary.source != command.source:
            return False
        return command.version in ("", canary.version)

    def _wanted(self, command: Control) -> RolledOut:
        if self._canary is not None and self._is_canary(command):
            return self._canary
        self._n_updates += 1
        return RolledOut(command.source, command.version or str(self._n_updates))

    async def _try(self, wanted: RolledOut, command: Control, members: Seq[Member]) -> None:
        n = min(len(members) - 1, max(1, round(command.share * len(members))))
        has = [one for one in members if self.has(one) is wanted]
        more = [one for one in reversed(members) if one not in has][: max(0, n - len(has))]
        await self._all(wanted, more, command.running)
        self._canary, self._share, self._n_canaries = wanted, command.share, max(n, len(has))

    async def _replace(self, wanted: RolledOut, members: Seq[Member], running: str) -> None:
        await self._all(wanted, members, running)
        self._before, self._stable, self._canary = self._stable, wanted, None

    async def _roll_back(self, members: Seq[Member], running: str) -> None:
        wanted = self._before if self._canary is None else self._stable
        assert wanted is not None
        await self._all(wanted, members, running)
        if self._canary is None:
            self._stable, self._before = wanted, None
        self._canary = None

    def _due(self, member: Member, members: Seq[Member]) -> RolledOut | None:
        """The weights that ``member``, one of ``members``, should have; None: it has them."""
        n_canaries = sum(self.has(one) is self._canary for one in members)
        lacks = self._canary is not None and n_canaries < self._n_canaries
        tries = self.has(member) is self._canary or (lacks and member not in self._settled)
        wanted = self._canary if tries else self._stable
        return None if wanted is self.has(member) else wanted

    async def _give(self, member: Member, weights: RolledOut, running: str = "") -> None:
        """Have ``member`` carry out an update, with that fate of ``running`` requests. Raises as ``Ask``."""
        if not member.ready:
            raise EngineDead("the replica is gone")
        member.updating = True
        self._weigh(member)
        try:
            command = Control(
                id=uuid.uuid4().hex,
                action="update_weights",
                source=weights.source,
                version=weights.version,
                running=running,
            )
            member.identity = (await self._ask(member, command)).info["weights"]
            self._given[member] = weights
            for stream in member.streams.values():
                stream.weights = member.weights  # what they were told goes on with these
        finally:
            member.updating = False
            self._weigh(member)

    async def _all(self, wanted: RolledOut, members: Seq[Member], running: str) -> None:
        """Raises as ``carry_out``."""
        done: list[tuple[Member, RolledOut]] = []
        for member in members:
            had = self.has(member)
            if had is wanted or not member.ready:
                continue
            try:
                await self._give(member, wanted, running)
            except EngineDead:  # whoever takes its place is given what is due
                continue
            except JserveError as error:
                await self._undo(done, error)
                raise
            done.append((member, had))
        if not done and any(self.has(one) is not wanted for one in members):
            raise EngineDead("no replica could be given other weights", retry_after=5.0)

    async def _undo(self, done: Seq[tuple[Member, RolledOut]], error: JserveError) -> None:
        for member, had in reversed(done):
            try:
                await self._give(member, had)
            except EngineDead:
                continue
            except JserveError as again:
                log.error("replica %s keeps other weights: %s", member.name, again.message)
                why = f"{error.message}; and the old weights are not to be had: {again.message}"
                raise WeightsError(why, field=error.field) from None
