"""The ladder of step shapes: whatever fits the limits has a program, and drafts add few."""

from __future__ import annotations

import pytest

from jserve.runner.buckets import Ladder, Needs
from jserve.spec.choice import widths


def ladder(n_drafts: int, rows: int = 32, **options) -> Ladder:
    return Ladder.of(
        max_decode_rows=rows,
        max_prefill_tokens=512,
        max_prefill_rows=8,
        max_drafts=n_drafts,
        **options,
    )


@pytest.mark.parametrize("rows", [1, 3, 8, 20, 32, 100])
@pytest.mark.parametrize("n_drafts", [1, 3, 7, 15])
def test_a_step_of_drafts_alone_has_a_program_of_its_width(n_drafts, rows):
    made = ladder(n_drafts, rows)
    for n in range(1, rows + 1):
        for width in range(2, n_drafts + 2):
            bucket = made.choose(Needs(D=n, P=0, F=0, J=width))
            assert bucket.P == 0
            assert next(w for w in widths(n_drafts) if w >= width) == bucket.J
            assert max(8, 4 * n) >= bucket.D


def test_drafts_beside_prefill_and_masks_have_one_too():
    made = ladder(7, masks=True)
    for needs in (
        Needs(D=2, P=32, F=1, J=8),
        Needs(D=1, P=100, F=4, J=3),
        Needs(D=32, P=512, F=8, J=8),
        Needs(D=5, P=0, F=0, J=2, mask=True),
        Needs(D=32, P=512, F=8, J=8, mask=True, score=True),
    ):
        assert needs.fit(made.choose(needs))


def test_the_number_of_programs_is_what_the_docs_say():
    none, some = ladder(0, masks=True), ladder(7, masks=True)
    assert len(some.buckets) == len(none.buckets) + 15
    assert set(none.buckets) - set(some.buckets) <= {b for b in none.buckets if b.P == 512}


def test_synthetic_runs_have_masks_at_every_width():
    made = ladder(7, masks=True, masks_drafts=True)
    for n in (2, 8, 32):
        for width in (2, 4, 8):
            bucket = made.choose(Needs(D=n, P=0, F=0, J=width, mask=True))
            assert (n, width) == (bucket.D, bucket.J)
