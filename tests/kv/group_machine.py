"""The cache's state machine over groups of layers that look back differently far."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from jserve.kv_layout import Reach, Span
from jserve.window import PageDemand, tokens_ahead
from tests.kv.cache_machine import MAX_LEN, CacheMachine
from tests.kv.disk_drive import DiskDrive
from tests.sched.sched_drive import VOCAB, Drive, MixedDrafts, config, drafting, limits

LONGEST = 53
"""Tokens of a request of ``sched_machine`` at the most."""
FULL = Reach(Span(), 1)
REACHES = {
    "one full, two of a window": (FULL, Reach(Span(9), 2)),
    "a window of less than a page": (FULL, Reach(Span(3), 1)),
    "two full, one of a window": (Reach(Span(), 2), Reach(Span(14), 1)),
    "chunks": (FULL, Reach(Span(chunk=8), 3)),
    "chunks that end within pages": (FULL, Reach(Span(chunk=6), 1)),
    "windows alone": (Reach(Span(20), 1), Reach(Span(5), 2)),
    "three reaches": (FULL, Reach(Span(17), 1), Reach(Span(6), 1)),
}


class GroupMachine(CacheMachine):
    """``CacheMachine`` whose pages belong to groups of layers, with tiers too."""

    @initialize(
        depth=st.sampled_from([0, 1, 2]),
        n_pages=st.sampled_from([0, 6, 40]),
        n_host_pages=st.sampled_from([0, 3, 15, 60]),
        disk=st.booleans(),
        preemption=st.sampled_from(["swap", "recompute", "auto"]),
        reaches=st.sampled_from(sorted(REACHES)),
        page_size=st.sampled_from([1, 4, 4, 8]),
        chunk=st.sampled_from([0, 1, 5, 8]),
        drafts=st.sampled_from([0, 0, 3]),
        handle_pages=st.sampled_from([0, 9]),
        session_ttl_s=st.sampled_from([4.0, 100.0]),
        reuse=st.sampled_from([True, True, False]),
        vocab=st.sampled_from([VOCAB, 2]),
    )
    def start(
        self,
        depth,
        n_pages,
        n_host_pages,
        disk,
        preemption,
        reaches,
        page_size,
        chunk,
        drafts,
        handle_pages,
        session_ttl_s,
        reuse,
        vocab,
    ):
        """``n_pages``: beyond those that the longest request takes."""
        groups = REACHES[reaches]
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
        lim = limits(
            page_size=page_size,
            max_drafts=drafts,
            max_model_len=MAX_LEN,
            vocab_size=vocab,
            reaches=groups,
            n_host_pages=n_host_pages,
            page_move_s=1e-4,
        )
        scheduling = config(max_prefill_chunk=chunk).scheduler
        ahead = tokens_ahead(scheduling, lim.max_prefill_tokens, drafts)
        least = PageDemand.of(groups, page_size, ahead).most(LONGEST)
        lim = dataclasses.replace(lim, n_pages=1 + least + n_pages)
        if drafts:
            self.drive = drafting(MixedDrafts(), lim, **options)
        else:
            self.drive = (DiskDrive if n_host_pages and disk else Drive)(lim, **options)
        self.n = 0
