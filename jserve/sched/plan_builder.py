"""Builds a step's plan: adds rows within the step's budgets, then freezes them.

A row takes over what a runner needs of its sequence as values; ``seqs`` keeps which sequence that is, for
the commit.

It owns the budgets of one step and the counters that a row moves on its sequence.

A row of ``count`` tokens moves ``scheduled`` by ``count``; an emitting row moves ``in_flight`` by
the most tokens it can draw. Commit takes back what was not drawn::

    before   len(tokens) + in_flight == scheduled + 1        (every sequence past its prefill)
    row      scheduled += 1 + drafts    in_flight += 1 + drafts
    commit   len(tokens) += n_ok        in_flight -= 1 + drafts      scheduled -= 1 + drafts - n_ok
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jserve.kv.ledger import Cache
from jserve.types import RowPlan, Sequence, SlotLoad, StepPlan


class PlanBuilder:
    """Rows and budgets of the step being planned."""

    def __init__(
        self,
        *,
        tokens: int,
        prefill_tokens: int,
        prefill_rows: int,
        chunk: int,
        loads_text: bool = False,
        slot_features: Seq[str] = (),
    ) -> None:
        self.tokens_left = tokens
        self.prefill_left = prefill_tokens
        self.prefill_rows_left = prefill_rows
        self.chunk, self.loads_text = chunk, loads_text
        self.slot_features = slot_features
        self.n_prefill = 0
        """Tokens of prefill rows so far."""
        self.n_draft = 0
        """Drafts that the device shall leave in the slots of emitting rows."""
        self.rows: list[RowPlan] = []
        self.seqs: list[Sequence] = []
        """The sequence of each row."""
        self.loads: list[SlotLoad] = []

    def limit(self, prefill_tokens: int) -> None:
        """From now on at most ``prefill_tokens`` more prefill tokens."""
        self.prefill_left = min(self.prefill_left, prefill_tokens)

    def longest(self) -> int:
        """Tokens of the longest row so far."""
        return max([row.start + row.count for row in self.rows], default=0)

    @property
    def prefill_room(self) -> int:
        """Tokens that one more prefill row may have; 0 when there can be none."""
        if self.prefill_rows_left <= 0:
            return 0
        return min(self.tokens_left, self.prefill_left, self.chunk)

    def decode(self, seqs: list[Sequence]) -> None:
        """Rows of one token that read it from their slots; the pages are held already."""
        self.rows += [
            RowPlan(choice=seq.choice, slot=seq.slot, start=seq.scheduled, count=1, from_slot=True)
            for seq in seqs
        ]
        self.seqs += seqs
        for seq in seqs:
            seq.scheduled += 1
            seq.in_flight += 1
            seq.pending += 1
        self.tokens_left -= len(seqs)

    def verify(
        self,
        seq: Sequence,
        drafts: Seq[int],
        mask: np.ndarray | None = None,
    ) -> None:
        """A row that reads its first token from the slot and tries ``drafts`` after it.

        The drafts of a guided sequence were trimmed to what its guide lets follow. ``mask`` goes with
        drafts of a sequence without a guide.
        """
        count = 1 + len(drafts)
        self.seqs.append(seq)
        self.rows.append(
            RowPlan(
                choice=seq.choice,
                slot=seq.slot,
                start=seq.scheduled,
                count=count,
                from_slot=True,
                drafts=drafts,
                mask=mask if seq.guide is None else seq.guide.mask(drafts),
                redraw=() if seq.guide is None else seq.guide.redraw(drafts),
            )
        )
        seq.scheduled += count
        seq.in_flight += count
        seq.pending += 1
        self.tokens_left -= count

    def prefill(self, seq: Sequence, *, owed: bool) -> None:
        """A row with the next known tokens of ``seq``, as many as there is room for; ``owed``: they are
        its prompt's, whose log-probabilities or values are still to be sent."""
        start = seq.scheduled
        count = min(seq.given - start, self.prefill_room)
        end = start + count
        emits = end == seq.given
        guide = seq.guide if emits else None
        scored = owed and seq.request.params.prompt_logprobs is not None
        self.rows.append(
            RowPlan(
                choice=seq.choice,
                slot=seq.slot,
                start=start,
                count=count,
                from_slot=False,
                tokens=tuple(seq.tokens[start:end]),
                emits=emits,
                next_token=-1 if emits else seq.tokens[end],
                targets=tuple(seq.tokens[start + 1 : end + 1]) if scored else (),
                prompt_features=seq.prompt_features if owed else (),
                mask=None if guide is None else guide.mask(()),
                redraw=() if guide is None else guide.redraw(()),
            )
        )
        seq.scheduled += count
        seq.in_flight += emits
        self.n_prefill += count
        self._took(seq, count)

    def backfill(self, seq: Sequence, start: int, end: int) -> None:
        """Add a row that backfills drafter KV of tokens ``start`` to ``end`` - 1 of ``seq``, which the
        target has computed already; as many as there is room for."""
        count = min(end - start, self.prefill_room)
        end = start + count
        self.rows.append(
            RowPlan(
                choice=seq.choice,
                slot=seq.slot,
                start=start,
                count=count,
                from_slot=False,
                tokens=tuple(seq.tokens[start:end]),
                emits=False,
                next_token=seq.tokens[end],
                backfill=True,
            )
        )
        self._took(seq, count)

    def _took(self, seq: Sequence, count: int) -> None:
        """A row of ``count`` known tokens has its part of the step."""
        self.seqs.append(seq)
        seq.pending += 1
        self.tokens_left -= count
        self.prefill_left -= count
        self.prefill_rows_left -= 1

    def load(self, seq: Sequence) -> None:
        """Have what the slot holds of ``seq`` filled before the step's rows run, if anything reads it."""
        params = seq.request.params
        asks = any([name in params.extra_args for name in self.slot_features])
        if self.loads_text or params.loaded or asks:
            self.loads.append(
                SlotLoad(
                    slot=seq.slot,
                    tokens=tuple(seq.tokens),
                    n_prompt=seq.n_prompt,
                    params=params,
                    vocab_row=seq.vocab_row,
                )
            )

    def freeze(self, step: int, cache: Cache, *, old_weights: bool = False) -> StepPlan:
        """The plan, with the current page table."""
        rows, longest = self.rows, self.longest() + self.n_draft
        slots = [row.slot for row in rows]
        return StepPlan(
            id=step,
            rows=tuple(rows),
            loads=tuple(self.loads),
            moves=cache.moves(step),
            page_table_RM=cache.snapshot(slots, longest),
            group_tables=cache.group_tables(slots, longest),
            old_weights=old_weights,
            n_draft=self.n_draft,
        )
