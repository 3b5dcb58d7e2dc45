"""The floor of an engine: its page cache, its queue and its slots, made from limits and options.

Owns how they are sized for each other: pages of a sequence, quota of handles, who may run at once. Must not
know requests or plans.
"""

from __future__ import annotations

from jserve.config import EngineConfig, SchedulerOptions
from jserve.kv.cache import PageCache
from jserve.kv.handles import quota_of
from jserve.ports import RunnerLimits
from jserve.sched.budget import PrefillCap
from jserve.sched.keeping import Keeping
from jserve.sched.queue import WaitQueue, weights_of
from jserve.sched.residency import Residency
from jserve.sched.swapping import Swapping
from jserve.window import chunk_of, tokens_ahead


def floor_of(limits: RunnerLimits, config: EngineConfig, cap: PrefillCap) -> Residency:
    """Nobody yet, over an empty page cache of these limits."""
    options = config.scheduler
    per_slot = -(-limits.max_model_len // limits.page_size)
    cache = PageCache(
        n_pages=limits.n_pages,
        page_size=limits.page_size,
        n_slots=limits.n_slots,
        pages_per_slot=per_slot,
        reuse=config.cache.prefix_caching,
        n_host_pages=limits.n_host_pages,
        window=limits.window,
        sinks=limits.sinks,
    )
    ahead = tokens_ahead(options, limits.max_prefill_tokens, limits.max_drafts)
    window_pages = cache.window.most_pages(ahead)
    longest = min(per_slot, window_pages or per_slot)
    return Residency(
        n_slots=limits.n_slots,
        max_running=_most_running(limits, options),
        cache=cache,
        waiting=WaitQueue(weights_of(options), options.ageing_s),
        keeping=Keeping(
            cache,
            handle_pages=quota_of(limits.n_pages, longest, config.cache.handle_pages),
            session_ttl_s=config.cache.session_ttl_s,
        ),
        chunk=chunk_of(options, limits.max_prefill_tokens),
        window_pages=window_pages,
        swapping=Swapping(cache, cap, mode=options.preemption, page_move_s=limits.page_move_s),
    )


def _most_running(limits: RunnerLimits, options: SchedulerOptions) -> int:
    """All who run must fit the decode rows of one step, so that nobody who decodes skips a step."""
    room = min(limits.n_slots, limits.max_rows, limits.max_decode_rows)
    return min(room, options.max_num_seqs, options.max_num_batched_tokens)
