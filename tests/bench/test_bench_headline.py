"""The headline table: medians of pairs, cold starts apart, and verdicts that can fail."""

from __future__ import annotations

import copy

import pytest

from bench import headline


def turn(n: int, engine: str, s2: float, s1: float, gap: float, first: float, cold: bool) -> dict:
    """``s2``: also of S3 and S4."""
    quiet = {"bandwidth": {"gb_s_best": 40.0 + n}, "cpu": {"foreign_cores": 0.1}}
    return {
        "round": n,
        "engine": engine,
        "start": {"cold": cold, "ready_s": first - 1, "first_token_s": first},
        "workloads": {
            "S1": {"decode_tok_s_p50": s1, "share_of_bandwidth": 80.0, **quiet},
            "S2": {"output_tok_s": s2, "gflop_s": 300.0, **quiet},
            "S3": {"output_tok_s": s2, **quiet},
            "S4": {"output_tok_s": s2, "longest_gap_ms": gap, **quiet},
        },
    }


@pytest.fixture
def result() -> dict:
    return {
        "machine": {"date": "2026-01-01T00:00:00Z"},
        "model": {"name": "tiny"},
        "turns": [
            turn(0, "jserve", 700, 200, 90, 24.0, True),
            turn(0, "vllm", 560, 150, 500, 40.0, False),
            turn(0, "llamacpp", 300, 180, 900, 3.0, False),
            turn(1, "llamacpp", 300, 180, 900, 3.0, False),
            turn(1, "vllm", 280, 150, 500, 40.0, False),
            turn(1, "jserve", 350, 240, 110, 3.5, False),
        ],
    }


def rows(result: dict) -> dict[str, list[str]]:
    name = f"| {result['model']['name']} |"
    lines = [line for line in headline.markdown([result]) if line.startswith(name)]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {c[1].split(",")[0]: c[2:] for c in cells}


def test_values_are_medians_and_ratios_are_taken_inside_rounds(result: dict) -> None:
    chat = rows(result)["chat mix at 16"]
    assert chat == ["525", "420 (x1.25)", "300 (x1.75)", "at least 1.1 of vllm", "kept"]


def test_the_larger_model_has_aims_of_its_own(result: dict) -> None:
    aims = {}
    for name in ("llama-60m", "llama-1b"):
        result["model"]["name"] = name
        aims[name] = {title: cells[-2] for title, cells in rows(result).items()}
    ours, larger = aims.values()
    prefix = "shared prefix of 1"
    assert (ours["chat mix at 16"], ours[prefix]) == (
        "at least 1.1 of vllm",
        "at least 1.2 of vllm",
    )
    assert (larger["chat mix at 16"], larger[prefix]) == (
        "at least 1.0 of vllm",
        "at least 1.1 of vllm",
    )
    assert ours["batch-1 decode"] == larger["batch-1 decode"] == "at least 1.0 of the better peer"
    assert ours["start to first token"] == "below 25 s", "the cold one is last"
    assert larger["start to first token"] == "below 35 s"


def test_cold_and_warm_starts_are_apart(result: dict) -> None:
    lines = [line for line in headline.markdown([result]) if "start to first" in line]
    warm, cold = ([c.strip() for c in line.strip("|").split("|")][2:] for line in lines)
    assert (warm[0], *warm[-2:]) == ("3.5", "below 4 s", "kept")
    assert (cold[0], *cold[-2:]) == ("24", "below 25 s", "kept")


@pytest.mark.parametrize(
    ("engine", "path", "value", "title"),
    [
        ("jserve", ("workloads", "S2", "output_tok_s"), 300.0, "chat mix at 16"),
        ("jserve", ("workloads", "S3", "output_tok_s"), 300.0, "shared prefix"),
        ("jserve", ("workloads", "S4", "output_tok_s"), 250.0, "a 4k prompt amid 8 decoders"),
        ("llamacpp", ("workloads", "S1", "decode_tok_s_p50"), 300.0, "batch-1 decode"),
        ("jserve", ("workloads", "S4", "longest_gap_ms"), 251.0, "longest gap while a 4k prompt"),
        ("jserve", ("start", "first_token_s"), 26.0, "start to first token"),
    ],
)
def test_a_figure_beyond_its_aim_is_called_missed(
    result: dict, engine: str, path: tuple[str, ...], value: float, title: str
) -> None:
    bad = copy.deepcopy(result)
    for t in bad["turns"]:
        if t["engine"] == engine:
            holder = t
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
    before = [line for line in headline.markdown([result]) if "MISSED" in line]
    after = [line for line in headline.markdown([bad]) if "MISSED" in line]
    assert before == []
    assert after
    assert all(title in line for line in after)


def test_without_the_peer_nothing_is_claimed(result: dict) -> None:
    result["turns"] = [t for t in result["turns"] if t["engine"] == "jserve"]
    table = rows(result)
    assert table["chat mix at 16"][-1] == "not measured"
    assert table["batch-1 decode"][:3] == ["220", "-", "-"]


def test_the_state_of_the_machine_stands_below(result: dict) -> None:
    last = list(headline.markdown([result]))[-1]
    assert "triad 40-41 GB/s" in last
    assert "foreign load 0.1 cores" in last
    assert "80 % of the triad" in last
