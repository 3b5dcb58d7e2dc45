"""Every number of the reports against hand-made traces."""

from __future__ import annotations

import numpy as np
import pytest

from bench.stats import Trace, intrusion, pair_ratio, percentile, spread, summarise, waves


def trace(sent: float, *text: float, late: bool = False, usage: int | None = None) -> Trace:
    n = usage if usage is not None else len(text)
    return Trace(
        sent=sent,
        ended=text[-1] if text else sent,
        text=list(text),
        wanted=n,
        prompt_tokens=10,
        usage=n,
        finish="length",
        late=late,
    )


@pytest.mark.parametrize("q", [0, 1, 50, 95, 99, 100])
@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(q: float, n: int) -> None:
    values = np.random.default_rng(n).normal(size=n).tolist()
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), abs=1e-12)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 100.5)])
def test_percentile_refuses_nonsense(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


def test_spread_is_in_milliseconds() -> None:
    assert spread([0.001, 0.003]) == {"p50": 2.0, "p95": 2.9, "p99": 2.98, "max": 3.0}
    assert spread([]) is None


def test_summary_of_two_requests() -> None:
    result = summarise([trace(0.0, 1.0, 2.0, 4.0), trace(1.0, 1.5, 2.0, 2.5)])
    assert result["wall_s"] == 4.0
    assert result["output_tokens"] == 6
    assert result["output_tok_s"] == 1.5
    assert result["prompt_tokens"] == 20
    assert result["ttft_ms"]["p50"] == 750
    assert result["itl_ms"]["max"] == 2000
    # (3 - 1) tokens in 3 s and in 1 s
    assert result["decode_tok_s_p50"] == pytest.approx((2 / 3 + 2) / 2, abs=1e-3)
    assert result["errors"] == 0


def test_failed_requests_do_not_speed_anything_up() -> None:
    bad = trace(0.0, 0.1)
    bad.error = "status 500"
    result = summarise([trace(0.0, 1.0, 2.0), bad])
    assert (result["requests"], result["errors"]) == (2, 1)
    assert result["output_tokens"] == 2
    assert result["first_errors"] == ["status 500"]


def test_coalesced_chunks_count_tokens_by_usage() -> None:
    result = summarise([trace(0.0, 1.0, 2.0, usage=5)])
    assert result["output_tokens"] == 5
    assert result["tokens_per_chunk"] == 2.5


def test_more_chunks_than_claimed_is_a_complaint_and_is_never_served() -> None:
    t = trace(0.0, 1.0, 2.0, 3.0)
    t.usage = t.wanted = 2
    assert t.complaint == "3 chunks but usage 2"
    assert t.tokens == 3


def test_waves_split_by_time_of_sending() -> None:
    traces = [trace(5.0, 5.1), trace(0.0, 1.0), trace(0.0, 3.0), trace(6.0, 6.3)]
    assert waves(traces, 2) == {"ttft_first_wave_ms": 2000.0, "ttft_steady_ms": 200.0}


def test_intrusion_counts_gaps_that_overlap_the_long_prompt() -> None:
    # The long request is read from 10 to 20. Gaps: 2 before, then 9 (overlaps), then 30 after.
    decoder = trace(0.0, 7.0, 9.0, 18.0, 20.0, 50.0)
    early = trace(0.0, 1.0, 11.0)
    harm = intrusion([decoder, early, trace(10.0, 20.0, late=True)])
    assert harm["long_ttft_ms"] == 10000
    assert harm["longest_gap_ms"] == 10000
    assert harm["itl_during_ms"]["p50"] == 9000
    assert harm["finished_early"] == 1
    assert intrusion([decoder]) == {}


def test_pair_ratios_are_taken_inside_rounds() -> None:
    assert pair_ratio([10.0, 30.0, 40.0], [20.0, 20.0, 10.0]) == {
        "median": 1.5,
        "min": 0.5,
        "max": 4.0,
        "pairs": 3,
    }
    assert pair_ratio([], []) is None
    with pytest.raises(ValueError, match="zip"):
        pair_ratio([1.0], [])
