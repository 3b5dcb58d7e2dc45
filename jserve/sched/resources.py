"""Holds the wait queue, the running sequences, their slots, page leases and vocab rows; admits and preempts.

It owns the queue, the running sequences, the free slots, the vocab rows and the page cache, and moves sequences
between them.

Why slots and pages of a finished or preempted sequence may be reused at once, although a step in flight may hold
one more row of it: programs run in launch order. The next sequence that gets the slot or the pages is planned
later, so its ``SlotLoad``, its first row (which carries ids and an exact start) and its KV writes come after the
over-run row. What that row leaves behind (last token, length, counts, KV behind the published pages) is overwritten
before it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from jserve.config import EngineConfig, SchedulerOptions
from jserve.kv.cache import PageCache
from jserve.kv.groups import GroupedCache
from jserve.kv.handles import quota_of
from jserve.kv.ledger import Cache
from jserve.ports import RunnerLimits
from jserve.sched import policy
from jserve.sched.admission.forecast import Lengths, reserve
from jserve.sched.admission.queue import OrderedSeqs, WaitQueue, weights_of
from jserve.sched.cache.entry import EntryPages
from jserve.sched.cache.retention import CacheRetention, root_of
from jserve.sched.cache.swap import SwapPolicy
from jserve.sched.vocab_rows import VocabRows
from jserve.timing.prefill_cap import PrefillCap
from jserve.types import Finish, Lane, Request, SeqState, Sequence
from jserve.window import PageDemand, chunk_of, tokens_ahead


class Resources:
    """Moves sequences between waiting and running: admit, grow, preempt, finish."""

    def __init__(
        self,
        *,
        n_slots: int,
        max_running: int,
        cache: Cache,
        waiting: WaitQueue,
        vocab_rows: VocabRows | None = None,
        retention: CacheRetention | None = None,
        chunk: int = 0,
        demand: PageDemand | None = None,
        swap_policy: SwapPolicy | None = None,
    ) -> None:
        self.cache = cache
        self.swap_policy = swap_policy or SwapPolicy(cache, None, mode="recompute", page_move_s=0.0)
        self.chunk = chunk
        """Most tokens of a prefill row: with a window, pages are taken a row ahead."""
        self.demand = demand or PageDemand(page_size=cache.page_size)
        self.entry = EntryPages(cache, self.demand, chunk)
        self.retention = retention or CacheRetention(cache)
        self.max_running = max_running
        self.waiting = waiting
        self.running = OrderedSeqs()
        self.n_running = dict.fromkeys(Lane, 0)
        self.lengths = Lengths()
        self._most_pages = 0
        """Pages of all who run at their full lengths, shared ones counted for each."""
        self.n_preemptions = 0
        self.n_looked_up = 0
        self.n_hit = 0
        self.exports: list[tuple[int, bytes]] = []
        """(page, digest) of pages that are to be written for other engines, oldest first."""
        self.vocab_rows = vocab_rows or VocabRows(n_slots)
        self._slots = deque(range(n_slots))
        self._refused: tuple[Sequence, int, int] | None = None

    @property
    def full(self) -> bool:
        return len(self.running) >= self.max_running

    def n_known(self, seq: Sequence) -> int:
        """Pages of ``seq`` that could be shared now."""
        return self.cache.n_known(root_of(seq.request), seq.tokens)

    def enter(self, seq: Sequence) -> bool:
        """A slot and pages for all known tokens of ``seq``, and the vocab row that it does not lack; False,
        with no trace, if there are not enough pages."""
        state = (seq, self.cache.n_available, len(self.running))
        if self._refused == state:
            return False  # nothing came back since it was refused, so do not search the tree again
        reuse, cache = self._reuses(seq), self.cache
        shares = not seq.request.skip_prefix_cache and not seq.old_weights
        lease = cache.match(
            root_of(seq.request),
            seq.tokens,
            slot=self._slots[0],
            reuse=reuse,
            cacheable=shares and not self.entry.rolls(seq),
            keeps=self.retention.keeps(seq.request),
        )
        if seq.old_weights:
            for part in lease.parts:
                part.n_weights = -1  # not those that the cache knows
        n_found = lease.capacity
        n_cached = self.swap_policy.reach(seq, n_found)
        cache.slide(lease, n_cached)
        first, later = self.entry.tokens(seq, n_cached, lease)
        if not cache.admit(lease, first, keep=self._keep(seq) + later):
            cache.release(lease)
            self._refused = state
            return False
        self.n_looked_up += len(seq.tokens) if reuse else 0
        self.n_hit += n_found
        if seq.n_preempted == 0 and not seq.n_output:
            seq.n_cached = n_cached
        self.waiting.remove(seq)
        seq.slot, seq.lease, seq.state = self._slots.popleft(), lease, SeqState.RUNNING
        seq.scheduled, seq.given = n_cached, len(seq.tokens)
        self.swap_policy.enter(seq, n_found, n_cached)
        self._join(seq)
        n_out = self.lengths.expected(seq.request.lane, seq.max_len - seq.n_prompt)
        self.waiting.entered(seq, len(seq.tokens) - n_cached, n_out)
        return True

    def _keep(self, seq: Sequence) -> int:
        """Pages that must stay available when ``seq`` is admitted, for the growth of all running sequences."""
        demand = self.demand
        least = policy.headroom(len(self.running)) * demand.n_groups
        if not len(self.running) or self._most_pages + self._most(seq) <= self.cache.pool.n_usable:
            return least  # alone, or all can grow to their end side by side
        reserved = [
            n * reserve(self.running, seq, self.lengths, demand.page_size, bound, part)
            for part, (n, bound) in enumerate(demand.parts)
        ]
        return max(least, sum(reserved))

    def _most(self, seq: Sequence) -> int:
        """Pages that ``seq`` ever holds at once."""
        return self.entry.most(seq)

    def _reuses(self, seq: Sequence) -> bool:
        """One that rolls shares pages only where there is room for them beside its own."""
        return reuses_cache(seq) and self.entry.may_share(seq)

    def slide(self, seq: Sequence, n_tokens: int) -> None:
        """Give back the pages of ``seq`` that no token from position ``n_tokens`` on reads; one that rolls
        takes as many for what comes next."""
        if not self.entry.slides:
            return
        lease = seq.lease
        assert lease is not None
        self.cache.slide(lease, n_tokens)
        if self.entry.rolls(seq):
            rolled = self.cache.admit(lease, self.entry.rolled(seq, lease))
            assert rolled, f"{seq.request.id} gave pages back and finds none"

    def tokens_ahead(self, seq: Sequence) -> int:
        """Tokens whose pages ``seq`` must hold before its next row of known tokens is planned."""
        if not self.entry.slides:
            return seq.given
        return min(seq.given, seq.scheduled + self.chunk)

    def preempt_for_interactive(self, now: float, held_back: Callable[[Sequence], bool]) -> None:
        """Preempt bulk sequences for the first interactive one that lacks a slot, a vocab row or pages.

        Call it before the step's rows are planned, since a row needs its sequence's pages. It preempts
        only where that frees enough. ``held_back``: sequences that wait for something else.
        """
        seq = self._urgent(now, held_back)
        if seq is None:
            return
        wanted = self.entry.pages(seq) + self._keep(seq)
        short, chosen = wanted - self.cache.n_available, []
        victims, lacks_row = policy.preemptible_bulk(self.running), self.vocab_rows.lacks(seq)
        if lacks_row:  # somebody who holds one comes first
            victims.sort(key=lambda victim: victim.vocab_row < 0)
            victims = victims if victims and victims[0].vocab_row >= 0 else []
        for victim in victims:
            if short <= 0 and (chosen or not (self.full or lacks_row)):
                break
            assert victim.lease is not None
            short -= victim.lease.n_own
            chosen.append(victim)
        if short <= 0 and (chosen or not lacks_row):
            for victim in chosen:
                self.preempt(victim)

    def _urgent(self, now: float, held_back: Callable[[Sequence], bool]) -> Sequence | None:
        """The first of lane interactive whose turn it could be, if any bulk runs."""
        lane = Lane.INTERACTIVE
        if not self.waiting.lanes[lane].n or not self.n_running[Lane.BULK]:
            return None
        candidates, promised = self.waiting.candidates(now), False
        while (seq := candidates.next()) is not None and not seq.pending:
            lacks_row = self.vocab_rows.lacks(seq)
            if seq.request.lane == lane:
                if not held_back(seq) and not (lacks_row and promised):
                    return seq
            elif lacks_row:
                candidates.skip(seq)
                promised = True  # the next row is not for a later one
            elif not candidates.skip_blocked(seq):
                return None
        return None

    def tokens_known(self, request: Request) -> int:
        """Prompt tokens of ``request`` that the cache holds now; nothing is reserved."""
        if request.skip_prefix_cache:
            return 0
        return self.cache.page_size * self.cache.n_known(root_of(request), request.prompt_ids)

    def grow(self, seq: Sequence, n_tokens: int) -> bool:
        """Pages for ``n_tokens``, taken from later sequences if need be; False: ``seq`` itself was preempted."""
        assert seq.lease is not None
        while not self.cache.extend(seq.lease, n_tokens):
            victim = policy.victim(self.running.after(seq)) or seq
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Preempt ``seq``: it requeues with its tokens and seed; results in flight still apply."""
        if not (owes_prompt(seq) or seq.old_weights):
            self.swap_policy.leave(seq)
        self._requeue(seq)
        seq.n_preempted += 1
        self.n_preemptions += 1

    def requeue_all(self, *, weights: str | None = None, keep_disk: bool = True) -> None:
        """The device lost its pages: all who run start over, and nothing is cached any more, except on disk. The
        arguments are those of ``PageCache.clear``.

        No step may be in flight. It counts as no preemption, so protection keeps its meaning.
        """
        for seq in self.running.snapshot():
            assert seq.pending == 0, f"{seq.request.id} has rows in flight"
            self._requeue(seq)
        self.retention.lose()
        self.cache.clear(weights=weights, keep_disk=keep_disk)

    def keep_running(self, weights: str) -> None:
        """Other weights, of that name: all who run keep their pages, and nobody else finds those, nor any of before."""
        for seq in self.running.snapshot():
            assert seq.lease is not None
            if self.cache.loading(seq.lease):
                self._requeue(seq)  # no plan has brought its pages yet, and none will
        for seq in self.waiting:
            self.swap_policy.forget(seq)
        self.retention.lose()
        self.cache.clear(weights=weights)
        self._refused = None

    def _requeue(self, seq: Sequence) -> None:
        self._vacate(seq)
        seq.state = SeqState.PREEMPTED
        seq.scheduled = seq.given = 0
        self.waiting.add(seq)

    def leave(self, seq: Sequence) -> None:
        """``seq`` is over, wherever it was."""
        lease = seq.lease
        if seq.finish in (Finish.STOP, Finish.LENGTH):
            self.export(seq)
        self.vocab_rows.forget(seq)
        self.swap_policy.forget(seq)
        if lease is not None:
            self._vacate(seq)
            self.retention.ended(seq.request, lease)
        else:
            self.waiting.remove(seq)
        seq.state = SeqState.FINISHED
        self.waiting.settle(seq)
        self._refused = None

    def export(self, seq: Sequence) -> None:
        """Note the published pages of ``seq`` that another engine is to read, for whoever writes them."""
        if seq.request.exports_kv and seq.lease is not None:
            self.exports += self.cache.take_unexported(seq.lease)

    def tier_counters(self) -> dict[str, float]:
        """For /metrics, where there is a tier below the device."""
        tier = self.cache.tier
        return {} if tier is None else tier.counters() | self.swap_policy.counters()

    def check(self, held: tuple[int, ...] = ()) -> None:
        """Audit pages and slots against their owners; see ``PageCache.check``."""
        leases = [seq.lease for seq in self.running if seq.lease is not None]
        slots = sorted([*self._slots, *(seq.slot for seq in self.running)])
        assert slots == list(range(len(slots))), f"slots are lost or held twice: {slots}"
        assert len(leases) == len(self.running), "a running sequence holds no lease"
        assert all(seq.lease is None for seq in self.waiting), "a waiting sequence holds pages"
        self.vocab_rows.check(list(self.running))
        self.cache.check(leases, held, self.retention.handles.pinned())

    def _join(self, seq: Sequence) -> None:
        self.running.add(seq)
        self.vocab_rows.lease(seq)
        self.n_running[seq.request.lane] += 1
        self._most_pages += self._most(seq)

    def _vacate(self, seq: Sequence) -> None:
        assert seq.lease is not None
        self.running.remove(seq)
        self.n_running[seq.request.lane] -= 1
        self._most_pages -= self._most(seq)
        self.cache.release(seq.lease)
        self.vocab_rows.release(seq)
        self._slots.append(seq.slot)
        seq.lease, seq.slot = None, -1


def owes_prompt(seq: Sequence) -> bool:
    """True while log-probabilities or values of the prompt are still to be sent."""
    asked = seq.request.params.prompt_logprobs is not None or bool(seq.prompt_features)
    return asked and seq.n_output == 0


def reuses_cache(seq: Sequence) -> bool:
    """A prompt that is scored, or has values of its tokens, must be computed in full: it takes nothing from the
    cache. Nor does one whose weights are not those that the cache knows."""
    own = seq.request.skip_prefix_cache or seq.old_weights
    return not own and not owes_prompt(seq)


def resources_of(limits: RunnerLimits, config: EngineConfig, cap: PrefillCap) -> Resources:
    """Builds the page cache, wait queue and slot allocator from limits and options."""
    options = config.scheduler
    per_slot = -(-limits.max_model_len // limits.page_size)
    demand = PageDemand.of(
        limits.reaches,
        limits.page_size,
        tokens_ahead(options, limits.max_prefill_tokens, limits.max_drafts),
        limits.window,
        limits.sinks,
    )
    cache = _cache_of(limits, demand, per_slot, reuse=config.cache.prefix_caching)
    longest = demand.most(limits.max_model_len)
    return Resources(
        n_slots=limits.n_slots,
        max_running=_most_running(limits, options),
        vocab_rows=VocabRows(min(limits.n_vocab_rows, limits.n_slots)),
        cache=cache,
        waiting=WaitQueue(weights_of(options), options.ageing_s),
        retention=CacheRetention(
            cache,
            handle_pages=quota_of(limits.n_pages, longest, config.cache.handle_pages),
            session_ttl_s=config.cache.session_ttl_s,
        ),
        chunk=chunk_of(options, limits.max_prefill_tokens),
        demand=demand,
        swap_policy=SwapPolicy(cache, cap, mode=options.preemption, page_move_s=limits.page_move_s),
    )


def _cache_of(limits: RunnerLimits, demand: PageDemand, per_slot: int, *, reuse: bool) -> Cache:
    if limits.reaches:
        return GroupedCache(
            limits.reaches,
            demand,
            n_pages=limits.n_pages,
            n_slots=limits.n_slots,
            pages_per_slot=per_slot,
            reuse=reuse,
            columns=limits.group_columns,
            n_host_pages=limits.n_host_pages,
        )
    return PageCache(
        n_pages=limits.n_pages,
        page_size=limits.page_size,
        n_slots=limits.n_slots,
        pages_per_slot=per_slot,
        reuse=reuse,
        n_host_pages=limits.n_host_pages,
        window=limits.window,
        sinks=limits.sinks,
    )


def _most_running(limits: RunnerLimits, options: SchedulerOptions) -> int:
    """All running sequences fit the decode rows of one step, so none skips a step."""
    room = min(limits.n_slots, limits.max_rows, limits.max_decode_rows)
    return min(room, options.max_num_seqs, options.max_num_batched_tokens)
