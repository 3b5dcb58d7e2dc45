"""Replaces the weights of replicas that serve, one after the other: of all, or of a few first (a canary).

It owns the weights that each replica should have, the previous ones, and which requests a canary answers. ::

    update     one replica at a time gets no new requests, updates as a single engine does, and is back;
               if one fails, those before it get their weights back, and the command fails
    canary     only the youngest replicas; a share of new requests goes there, chosen by request id
    promotion  the same update without a share: the others follow
    rollback   the canary's replicas get the current weights again, or all the previous ones
    analysis   of a canary: promotion or rollback by what is measured (``fleet.canary``)
    a replica that joins gets the weights it should have before its first request
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.engine.wire import Control, HandleReply
from jserve.errors import BadRequest, EngineDead, JserveError, WeightsError
from jserve.fleet.canary import Analysis, CanaryVerdict, CanaryWatch
from jserve.fleet.member import Member
from jserve.ports import Clock
from jserve.types import FIRST_WEIGHTS, Output

ACTIONS = ("update_weights", "rollback_weights")
RETRY_S = 5.0
"""Until a replica that failed to load the weights it should have is tried again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Weights:
    """The source and version of an update. Two of the same source are two updates."""

    source: str
    version: str


Write = Callable[[Any], str]
"""Writes weights that are in memory to a new directory that replicas can read. Raises JserveError: they are none."""
Ask = Callable[[Member, Control], Awaitable[HandleReply]]
"""The answer of a replica to a command. Raises JserveError: it refuses; EngineDead: it is gone."""


class Rollout:
    """The weights of a fleet.

    Args:
        model: the weights that replicas start with, as ``update_weights`` takes them.
        ask: as ``Ask``.
        on_change: called when a replica begins or ends an update (``Member.updating``).
        clock: monotonic seconds.
        write: as ``Write``; what it wrote is deleted once nobody may need it. Without it updates are directories.
    """

    def __init__(
        self,
        model: str,
        ask: Ask,
        on_change: Callable[[Member], None],
        clock: Clock = time.monotonic,
        write: Write | None = None,
    ) -> None:
        self._ask, self._on_change, self._clock, self._write = ask, on_change, clock, write
        self._initial = self._current = Weights(model, FIRST_WEIGHTS)
        self._previous: Weights | None = None
        self._canary: Weights | None = None
        self._share, self._n_canaries = 0.0, 0
        self._watch: CanaryWatch | None = None
        """Of a canary that is promoted or rolled back by what is measured."""
        self._last: dict[str, Any] | None = None
        """The fate of the last canary."""
        self._again_at = 0.0
        self._loaded: dict[Member, Weights] = {}
        """The last update of each replica that had one."""
        self._checked: set[Member] = set()
        """Replicas that joined and had the weights they should have: none of them replaces a lost canary."""
        self._n_updates = 0
        self._lock, self._busy = asyncio.Lock(), False

    @property
    def busy(self) -> bool:
        """An operator's command is being carried out."""
        return self._busy

    @property
    def has_canary(self) -> bool:
        return self._canary is not None

    def check(self, command: Control, members: Seq[Member]) -> None:
        """Raises BadRequest for a command that ``members`` cannot carry out, or not now."""
        if self._busy:
            why = "not now: another update of the replicas is under way"
            raise BadRequest(why, code="operation_pending", field="action")
        if command.action == "rollback_weights":
            if self._canary is None and self._previous is None:
                raise BadRequest("there are no previous weights", field="action")
            return
        if self._write is None and not isinstance(command.source, str | Path):
            why = "source: replicas take a directory, which all of them can read"
            raise BadRequest(why, field="source")
        if command.analysis is not None:
            Analysis.of(command.analysis)
            if not command.canary:
                why = "analysis is of a canary, and canary says the share of its requests"
                raise BadRequest(why, field="analysis")
        for name in ("partial", "donate", "alias"):
            if getattr(command, name):
                raise BadRequest(f"{name} is of one engine; there are replicas", field=name)
        if not 0.0 <= command.canary < 1.0:
            raise BadRequest("canary must be at least 0 and below 1", field="canary")
        if command.running == "beside":
            why = "replicas are updated one after the other: finish"
            raise BadRequest(f"running: beside is of one engine; {why}", field="running")
        if command.canary and len(members) < 2:
            raise BadRequest("canary: it needs two replicas", field="canary")
        if command.canary and self._canary is not None and not self._is_canary(command):
            why = "canary: there is another one: update without a share or roll back first"
            raise BadRequest(why, field="canary")

    async def carry_out(
        self, command: Control, members: Seq[Member], why: str = "asked for"
    ) -> None:
        """Update ``members``, oldest first, or roll them back; ``why`` is for those who look later.

        Raises:
            BadRequest, WeightsError: it is not possible now, or a replica cannot load them; all have their weights
                of before again, or get no requests until they do.
            EngineDead: no replica is left that could load them.
        """
        self.check(command, members)
        self._busy = True
        try:
            async with self._lock:
                tried = self._canary
                if command.action == "rollback_weights":
                    await self._roll_back(members)
                else:
                    wanted = await self._wanted(command)
                    if command.canary:
                        await self._start_canary(wanted, command, members)
                    else:
                        await self._replace_all(wanted, members, command.running)
                if tried is not None and self._canary is None:
                    self._end_canary(tried, why)
        finally:
            self._busy = False

    def told(self, member: Member, output: Output, sent: object, sent_at: float) -> None:
        """``output`` of ``member`` came, of the attempt ``sent``."""
        if self._watch is not None:
            tried = self.weights_of(member) is self._canary
            self._watch.told(output, sent, sent_at, self._clock(), tried=tried)

    def over(self, request_id: str, n: int) -> None:
        """Nobody waits for the ``n`` choices of this request any more."""
        if self._watch is not None:
            self._watch.forget(request_id, n)

    def fault(self, member: Member, why: str) -> None:
        """Something happened to ``member`` that speaks against its weights, where these are a canary's."""
        if self._watch is not None and self.weights_of(member) is self._canary:
            self._watch.canary.faults.append(f"{member.name}: {why}")

    def judge(self) -> CanaryVerdict | None:
        """The verdict that is to be carried out now; None: there is none."""
        if self._watch is None or self._busy or self._clock() < self._again_at:
            return None
        found = self._watch.verdict(self._clock())
        return None if found.action == "wait" else found

    async def carry_out_verdict(self, found: CanaryVerdict, members: Seq[Member]) -> None:
        """Promote the canary or roll it back. A canary that cannot be promoted is rolled back next; what cannot be
        rolled back is tried again."""
        canary, watch = self._canary, self._watch
        if canary is None or watch is None or self._busy:
            return
        if found.action == "promote":
            command = Control(
                id=uuid.uuid4().hex,
                action="update_weights",
                source=canary.source,
                version=canary.version,
                running=watch.running,
            )
        else:
            command = Control(id=uuid.uuid4().hex, action="rollback_weights")
        try:
            await self.carry_out(command, members, found.why)
        except JserveError as error:
            log.error("canary %s: %s failed: %s", canary.version, found.action, error.message)
            if found.action == "promote":
                watch.canary.faults.append(f"the promotion failed: {error.message}")
            self._again_at = self._clock() + RETRY_S

    def begin_catch_up(self, member: Member, members: Seq[Member]) -> bool:
        """True if ``member``, one of ``members``, has other weights than it should: it gets no new requests from
        now on, and ``catch_up`` must be called."""
        if member.updating or (self._busy and member in self._checked):
            return False
        if self._expected(member, members) is self.weights_of(member):
            self._checked.add(member)
            return False
        member.updating = True
        self._on_change(member)
        return True

    async def catch_up(self, member: Member, members: Callable[[], Seq[Member]]) -> None:
        """Load the weights that ``member`` should have, and retry for as long as it is one of ``members``."""
        while member in members():
            async with self._lock:
                weights = self._expected(member, members())
                try:
                    if weights is not self.weights_of(member):
                        await self._update(member, weights)
                    break
                except JserveError as error:
                    log.warning("replica %s lacks new weights: %s", member.name, error.message)
                    if self._watch is not None and weights is self._canary:
                        self._watch.canary.faults.append(f"{member.name}: {error.message}")
                    member.updating = True
                    self._on_change(member)
            await asyncio.sleep(RETRY_S)
        member.updating = False
        self._on_change(member)

    def leave(self, member: Member) -> None:
        """``member`` is gone."""
        self._loaded.pop(member, None)
        self._checked.discard(member)

    def close(self) -> None:
        """Delete what was written: no replica is asked to load anything any more."""
        self._current, self._previous, self._canary = self._initial, None, None
        self._loaded.clear()

    def weights_of(self, member: Member) -> Weights | None:
        """The weights that ``member`` has; None where another front or an earlier connection gave it some."""
        started = self._initial if member.weights == member.info.get("weights") else None
        return self._loaded.get(member, started)

    def member_for(self, request_id: str, members: Seq[Member]) -> Member | None:
        """One of ``members`` with the weights that should answer a new request; None: none of them has these."""
        drawn = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        is_canarys = self._canary is not None and int.from_bytes(drawn) < self._share * 2**64
        wanted = self._canary if is_canarys else self._current
        return next((one for one in members if self.weights_of(one) is wanted), None)

    def info(self, members: Seq[Member]) -> dict[str, Any]:
        """Facts for an operator: the current version, the canary's with its share and analysis, what became of the
        last one, each replica's version."""
        canary: dict[str, Any] | None = None
        if self._canary is not None:
            canary = {"version": self._canary.version, "share": self._share}
        if canary is not None and self._watch is not None:
            canary["analysis"] = self._watch.facts(self._clock())
        found = {one.name: self.weights_of(one) for one in members}
        replicas = {name: weights.version if weights else None for name, weights in found.items()}
        return {
            "version": self._current.version,
            "canary": canary,
            "last_canary": self._last,
            "replicas": replicas,
        }

    def _end_canary(self, canary: Weights, why: str) -> None:
        """Note what became of ``canary``, whose end was just carried out."""
        outcome = "promoted" if self._current is canary else "rolled_back"
        self._watch = None
        self._last = {"version": canary.version, "outcome": outcome, "why": why}
        log.warning("canary %s is %s: %s", canary.version, outcome.replace("_", " "), why)

    def _is_canary(self, command: Control) -> bool:
        canary = self._canary
        if canary is None or not isinstance(command.source, str | Path):
            return False
        if canary.source != str(command.source):
            return False
        return command.version in ("", canary.version)

    async def _wanted(self, command: Control) -> Weights:
        """Those of ``command``, written to a directory if it has them in memory. Raises as ``Write``."""
        if self._canary is not None and self._is_canary(command):
            return self._canary
        self._n_updates += 1
        version = command.version or str(self._n_updates)
        if self._write is None or isinstance(command.source, str | Path):
            return Weights(str(command.source), version)
        made = Weights(await asyncio.to_thread(self._write, command.source), version)
        weakref.finalize(made, shutil.rmtree, made.source, ignore_errors=True)
        return made

    async def _start_canary(self, wanted: Weights, command: Control, members: Seq[Member]) -> None:
        n = min(len(members) - 1, max(1, round(command.canary * len(members))))
        have = [one for one in members if self.weights_of(one) is wanted]
        others = [one for one in reversed(members) if one not in have]
        await self._update_each(wanted, others[: max(0, n - len(have))], command.running)
        self._canary, self._share, self._n_canaries = wanted, command.canary, max(n, len(have))
        self._watch, self._again_at = None, 0.0
        if command.analysis is not None:
            bounds = Analysis.of(command.analysis)
            self._watch = CanaryWatch(bounds, command.running, self._clock())

    async def _replace_all(self, wanted: Weights, members: Seq[Member], running: str) -> None:
        await self._update_each(wanted, members, running)
        self._previous, self._current, self._canary = self._current, wanted, None

    async def _roll_back(self, members: Seq[Member]) -> None:
        wanted = self._previous if self._canary is None else self._current
        assert wanted is not None
        await self._update_each(wanted, members)
        if self._canary is None:
            self._current, self._previous = wanted, None
        self._canary = None

    def _expected(self, member: Member, members: Seq[Member]) -> Weights:
        """The weights that ``member``, one of ``members``, should have."""
        if self._canary is None:
            return self._current
        if self.weights_of(member) is self._canary:
            return self._canary
        n_canaries = sum(self.weights_of(one) is self._canary for one in members)
        joins = n_canaries < self._n_canaries and member not in self._checked
        return self._canary if joins else self._current

    async def _update(self, member: Member, weights: Weights, running: str = "") -> None:
        """Have ``member`` load ``weights``; ``running``: the fate of its requests. Raises as ``Ask``."""
        if not member.ready:
            raise EngineDead("the replica is gone")
        member.updating = True
        self._on_change(member)
        command = Control(
            id=uuid.uuid4().hex,
            action="update_weights",
            source=weights.source,
            version=weights.version,
            running=running,
        )
        try:
            await self._ask(member, command)
            self._loaded[member] = weights
        finally:
            member.updating = False
            self._on_change(member)

    async def _update_each(self, wanted: Weights, members: Seq[Member], running: str = "") -> None:
        """Raises as ``carry_out``."""
        updated: list[tuple[Member, Weights | None]] = []
        for member in members:
            had = self.weights_of(member)
            if had is wanted or not member.ready:
                continue
            try:
                await self._update(member, wanted, running)
            except EngineDead:  # the replica that takes its place will catch up
                continue
            except JserveError as error:
                await self._restore(updated, error)
                raise
            updated.append((member, had))
        if not updated and any(self.weights_of(one) is not wanted for one in members):
            raise EngineDead("no replica is left that could be updated", retry_after=5.0)

    async def _restore(
        self, updated: Seq[tuple[Member, Weights | None]], error: JserveError
    ) -> None:
        """Undo the updates of ``updated``, whose successor failed with ``error``. Raises WeightsError: not all of
        them; these catch up later, and get no requests until then."""
        for member, had in reversed(updated):
            try:
                await self._update(member, had or self._current)
            except EngineDead:
                continue
            except JserveError as again:
                log.error("replica %s cannot be restored: %s", member.name, again.message)
                why = f"{error.message}; and a replica cannot be restored: {again.message}"
                raise WeightsError(why, field=error.field) from None
