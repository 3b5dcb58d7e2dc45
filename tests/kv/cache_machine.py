"""The scheduler's state machine with tenants, hints, sessions, handles and a clock that jumps."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from jserve.errors import (
    BadRequest,
    CacheFull,
    CacheNotFound,
    ContextTooLong,
    JserveError,
    Overloaded,
    RateLimited,
)
from jserve.request_options import Retention
from jserve.sched.cache import handles as caching
from tests.kv.counting import Told, with_fields
from tests.kv.disk_drive import DiskDrive
from tests.sched.sched_drive import VOCAB, Drive, MixedDrafts, drafting, limits
from tests.sched.sched_machine import PREFIXES, SchedulerMachine, make, requests

MAX_LEN = 64
TENANTS = st.sampled_from(["", "", "b"])
NAMES = st.sampled_from(["h1", "h2", "h3"])
HINTS = st.lists(
    st.builds(
        lambda start, span, priority, seconds: Retention(
            start=start,
            end=None if span is None else start + span,
            priority=priority,
            seconds=seconds,
        ),
        st.integers(0, 12),
        st.sampled_from([None, 1, 4, 9]),
        st.sampled_from([0, 30, 50, 75, 100]),
        st.sampled_from([0.0, 3.0, 40.0]),
    ),
    max_size=3,
)


class CacheMachine(SchedulerMachine):
    """``SchedulerMachine`` with everything that outlives a request."""

    @initialize(
        depth=st.sampled_from([0, 1, 2]),
        n_pages=st.sampled_from([14, 18, 40]),
        n_host_pages=st.sampled_from([0, 2, 5, 20]),
        page_size=st.sampled_from([1, 4, 4, 8]),
        chunk=st.sampled_from([0, 1, 5, 8]),
        drafts=st.sampled_from([0, 0, 3]),
        disk=st.booleans(),
        handle_pages=st.sampled_from([0, 3]),
        session_ttl_s=st.sampled_from([4.0, 100.0]),
        window=st.sampled_from([(0, 0), (0, 0), (3, 0), (9, 0), (14, 5)]),
        preemption=st.sampled_from(["swap", "recompute", "auto"]),
        reuse=st.sampled_from([True, True, False]),
        vocab=st.sampled_from([VOCAB, 2]),
    )
    def start(
        self,
        depth,
        n_pages,
        n_host_pages,
        page_size,
        chunk,
        drafts,
        disk,
        handle_pages,
        session_ttl_s,
        window,
        preemption,
        reuse,
        vocab,
    ):
        """As ``SchedulerMachine.start``, with a host tier and the options of what is kept."""
        n_pages = 1 + -(-(n_pages - 1) * 4 // page_size)
        changes = {"n_host_pages": n_host_pages, "max_model_len": MAX_LEN}
        changes |= {"window": window[0], "sinks": window[1], "page_move_s": 1e-4}
        changes |= {"vocab_size": vocab}
        lim = limits(n_pages=n_pages, page_size=page_size, max_drafts=drafts, **changes)
        options = {
            "depth": depth,
            "eos_rate": 7,
            "max_prefill_chunk": chunk,
            "max_waiting": 8,
            "handle_pages": handle_pages,
            "session_ttl_s": session_ttl_s,
            "preemption": preemption,
            "prefix_caching": reuse,
        }
        proposing = drafting(MixedDrafts(), lim, **options) if drafts else None
        if proposing is None and n_host_pages and disk:
            self.drive = DiskDrive(lim, **options)
        else:
            self.drive = proposing or Drive(lim, **options)
        self.n = 0

    def _queue_has_room(self) -> bool:
        return len(self.drive.scheduler.resources.waiting) < 8

    def _make(self, spec: dict):
        return make(f"r{self.n}", spec, self.drive.limits.vocab_size)

    def _told(self, request) -> None:
        self.drive.requests[request.id] = request
        for i in range(request.params.n):
            self.drive.told[request.id, i] = Told()
        self.drive.check()

    @rule(
        spec=requests, tenant=TENANTS, hints=HINTS, session=st.sampled_from([None, None, "s", "t"])
    )
    def add_kept(self, spec, tenant, hints, session):
        if self._queue_has_room() and spec["n"] == 1:
            self.n += 1
            fields = {"tenant": tenant, "retain": tuple(hints), "session": session}
            made = with_fields(self._make(spec), **fields)
            before = self.shape()
            try:
                self.drive.add(made)
            except ContextTooLong:
                assert len(made.prompt_ids) + made.params.max_tokens > MAX_LEN
            except JserveError as error:
                assert self.shape() == before, "a refusal left a trace"
                self.check_refusal(made, error)

    @rule(
        tenant=TENANTS,
        name=NAMES,
        prefix=st.sampled_from(PREFIXES[1:]),
        ttl_s=st.sampled_from([1.0, 20.0, 500.0]),
    )
    def create(self, tenant, name, prefix, ttl_s):
        if not self._queue_has_room():
            return
        self.n += 1
        spec = with_fields(self._make(_plain(prefix)), tenant=tenant, cache=name)
        handles = self.drive.scheduler.resources.retention.handles
        before = (len(handles), handles.n_pages)
        try:
            caching.create(self.drive.scheduler, spec, ttl_s, self.drive.now)
        except (BadRequest, CacheFull, Overloaded, RateLimited):
            assert (len(handles), handles.n_pages) <= before, "a refusal left something behind"
            self.drive.check()
        else:
            self._told(spec)

    @rule(tenant=TENANTS, name=NAMES, rest=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def use(self, tenant, name, rest):
        if not self._queue_has_room():
            return
        self.n += 1
        spec = _plain(rest) | {"max_tokens": 3}
        request = with_fields(self._make(spec), tenant=tenant, cache=name)
        rest = request.prompt_ids
        handle = self.drive.scheduler.resources.retention.handles.get(tenant, name)
        try:
            self.drive.scheduler.submit(request, self.drive.now)
        except CacheNotFound:
            handles = self.drive.scheduler.resources.retention.handles
            assert handles.get(tenant, name) is None
            return
        except (Overloaded, RateLimited) as error:
            self.check_refusal(request, error)
            return
        assert handle is not None
        head = handle.tokens
        whole = request.prompt_ids[: len(head)] == head
        self._told(request if whole else with_fields(request, prompt_ids=(*head, *rest)))

    @rule(tenant=TENANTS, name=NAMES, ttl_s=st.sampled_from([2.0, 100.0]), drop=st.booleans())
    def renew_or_drop(self, tenant, name, ttl_s, drop):
        scheduler, now = self.drive.scheduler, self.drive.now
        try:
            if drop:
                caching.drop(scheduler, tenant, name, now)
            else:
                assert caching.renew(scheduler, tenant, name, ttl_s, now).expires_in_s == ttl_s
        except CacheNotFound:
            assert scheduler.resources.retention.handles.get(tenant, name) is None
        self.drive.check()

    @rule(number=st.integers(0, 5), fail=st.booleans())
    def disk_answers(self, number, fail):
        if isinstance(self.drive, DiskDrive):
            self.drive.deliver(number, fail=fail)

    @rule(lag=st.integers(1, 9))
    def disk_is_slow(self, lag):
        if isinstance(self.drive, DiskDrive):
            self.drive.lag = lag

    @rule(k=st.integers(0, 3))
    def disk_loses_files(self, k):
        if isinstance(self.drive, DiskDrive):
            for digest in list(self.drive.runner.disk)[:k]:
                del self.drive.runner.disk[digest]

    @rule(dt=st.sampled_from([0.5, 5.0, 50.0, 600.0]))
    def time_passes(self, dt):
        self.drive.now += dt

    @precondition(lambda self: not self.drive.flight)
    @rule()
    def device_is_lost(self):
        """All pages are gone; the running start over, handles stay and settle again."""
        self._hear_nothing(self.drive.scheduler.recover((), "", self.drive.now))
        self.drive.runner.reset()
        self.drive.committed.clear()
        self.drive.check()

    @staticmethod
    def _hear_nothing(outputs) -> None:
        assert outputs == []

    def teardown(self):
        super().teardown()
        if hasattr(self, "drive"):
            self._nothing_is_pinned_for_ever()

    def _nothing_is_pinned_for_ever(self) -> None:
        drive = self.drive
        handles = drive.scheduler.resources.retention.handles
        assert handles.n_pages == sum(h.n_pages for h in handles.of("") + handles.of("b"))
        assert handles.n_pages <= handles.quota
        drive.now += 1e6
        drive.scheduler.plan(drive.now)
        cache = drive.scheduler.resources.cache
        assert (len(handles), handles.n_pages) == (0, 0)
        assert not any(part.tree.n_pinned for part in cache.parts)
        cache.clear()
        assert cache.pool.n_free == cache.pool.n_usable
        assert not any(part.tree.roots for part in cache.parts)


def _plain(prompt) -> dict:
    """A greedy request of ``prompt`` with nothing to draw."""
    return {"prefix": (), "tail": list(prompt), "max_tokens": 0, "extras": {}, "deadlines": {}}
