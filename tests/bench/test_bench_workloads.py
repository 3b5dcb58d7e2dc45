"""The traffic is the same everywhere and has the shape its table says."""

from __future__ import annotations

import hashlib
import itertools
import statistics

import pytest

from bench import workloads
from bench.workloads import make

NAMES = ["S1", "S2", "S3", "S4", "S5@2", "S5@6", "chat@4", "chat@16", "warmup"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_items(name: str) -> None:
    assert make(name, seed=3) == make(name, seed=3)
    assert make(name, seed=3) != make(name, seed=4)


def test_the_traffic_never_changes_between_versions() -> None:
    items = [(i.prompt, i.max_tokens, i.after_tokens) for n in NAMES for i in make(n).items]
    assert hashlib.sha256(repr(items).encode()).hexdigest()[:16] == "ba4de0a585dc8849"


def test_no_two_workloads_share_the_start_of_a_prompt() -> None:
    starts = [i.prompt[:8] for n in NAMES if n != "S3" for i in make(n).items]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("name", NAMES)
def test_ids_stay_in_their_range(name: str) -> None:
    for item in make(name, low=5, high=9).items:
        assert set(item.prompt) <= {5, 6, 7, 8}
    drawn = {i for item in make(name).items for i in item.prompt}
    assert min(drawn) >= workloads.LOW_ID
    assert max(drawn) < workloads.HIGH_ID


def test_s1_is_single_stream() -> None:
    load = make("S1")
    assert load.concurrency == 1
    assert [(len(i.prompt), i.max_tokens) for i in load.items] == [(128, 128)] * 4


def test_s2_is_a_chat_mix_with_the_stated_means() -> None:
    load = make("S2", scale=40)
    assert load.concurrency == 16
    assert statistics.mean(len(i.prompt) for i in load.items) == pytest.approx(256, rel=0.05)
    assert statistics.mean(i.max_tokens for i in load.items) == pytest.approx(64, rel=0.05)
    lengths = [len(i.prompt) for i in load.items]
    assert statistics.median(lengths) < 0.9 * statistics.mean(lengths)


def test_s3_shares_exactly_its_prefix() -> None:
    load = make("S3")
    assert (load.concurrency, len(load.items)) == (8, 32)
    assert {i.prompt[:1500] for i in load.items} == {load.items[0].prompt[:1500]}
    assert len({i.prompt[1500:] for i in load.items}) == 32
    assert {len(i.prompt) for i in load.items} == {1560}


def test_s4_has_one_late_long_prompt_among_eight_decoders() -> None:
    load = make("S4")
    late = [i for i in load.items if i.after_tokens]
    assert (len(load.items), len(late), len(late[0].prompt)) == (9, 1, 4096)
    assert load.concurrency == 0


@pytest.mark.parametrize("rate", [2.0, 12.0])
def test_s5_arrives_at_its_rate(rate: float) -> None:
    times = [i.at for i in make(f"S5@{rate}", scale=50).items]
    assert times == sorted(times)
    assert times[0] == 0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.15)


def test_scale_changes_counts_and_not_lengths() -> None:
    assert len(make("S1", scale=0.5).items) == 2
    assert len(make("S2", scale=0.5).items) == 24
    assert len(make("S2", scale=0.01).items) == 16, "never less than one wave"
    assert make("S2", scale=0.5).items == make("S2").items[:24]


@pytest.mark.parametrize("name", ["S9", "S5", "chat", "S1@2", "S5@x", "S5@0", "chat@-1", "S5@nan"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="workload"):
        make(name)


def test_fixed_lengths() -> None:
    load = workloads.make("1000/7@3", scale=0.5)
    assert [(len(i.prompt), i.max_tokens) for i in load.items] == [(1000, 7)] * 3
    assert load.concurrency == 3
    assert len(workloads.make("1000/7@3").items) == 6
    assert workloads.make("1000/8@3").items[0].prompt != load.items[0].prompt
    for name in ("1000/7", "0/7@3", "fixed@3", "7@3", "1000/7@0"):
        with pytest.raises(ValueError, match=r"workload|above 0"):
            workloads.make(name)
