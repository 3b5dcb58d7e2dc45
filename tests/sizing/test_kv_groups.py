"""KV of models whose layers look back differently far, at 32k: what the plan says, what the ledger of pages holds, and
written-out sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from jserve.config import EngineConfig
from jserve.kv.groups import GroupedCache
from jserve.shapes import SHAPES
from jserve.sizing import plan as sizing, show
from jserve.sizing.layout import Layout
from jserve.sizing.plan import Plan
from jserve.window import PageDemand

LENGTH, Z = 32768, 64
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
MODELS = {
    "gemma-3-27b": GEMMA
    | {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
    "gemma-3-1b": GEMMA
    | {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "gpt-oss-20b": SHAPES["gpt-oss-20b"],
}
NEEDED = {
    # layers * tokens that they read * (keys and values) * heads * width * bytes
    "gemma-3-27b": (10 * LENGTH + 52 * 1024) * 2 * 16 * 128 * 2,
    "gemma-3-1b": (4 * LENGTH + 22 * 512) * 2 * 1 * 256 * 2,
    "gpt-oss-20b": (12 * LENGTH + 12 * 128) * 2 * 8 * 64 * 2,
}
MOST = {"gemma-3-27b": 1.06, "gemma-3-1b": 1.05, "gpt-oss-20b": 1.01}
ONE_REACH = {"gemma-3-27b": 5.33, "gemma-3-1b": 5.99, "gpt-oss-20b": 1.99}


def planned(tmp_path: Path, name: str, **options) -> tuple[Plan, Layout]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[name]))
    config = EngineConfig.of(max_model_len=LENGTH, **options)
    return sizing.plan(str(path), "h200", (2048, LENGTH), config)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_at_32k_counts_what_layers_read(tmp_path, name):
    found, _ = planned(tmp_path, name)
    longest = found.residents[-1]
    assert longest.pages * found.memory.page_bytes == pytest.approx(longest.over * NEEDED[name])
    assert longest.over <= MOST[name]
    before, _ = planned(tmp_path, name, kv_groups="off")
    assert before.kv_groups == ()
    assert before.residents[-1].over == pytest.approx(ONE_REACH[name], abs=0.01)
    assert longest.sequences > 1.9 * before.residents[-1].sequences
    assert found.kv_bytes_per_token == before.kv_bytes_per_token


@pytest.mark.parametrize("name", MODELS)
def test_the_ledger_at_32k_holds_what_layers_read(tmp_path, name):
    _, laid = planned(tmp_path, name)
    limits, kv = laid.sizes.limits, laid.sizes.kv
    demand = PageDemand.of(limits.reaches, Z, 3)
    cache = GroupedCache(
        limits.reaches, demand, n_pages=2000, n_slots=1, pages_per_slot=LENGTH // Z
    )
    lease = cache.match(("", "", None), [], slot=0, cacheable=False)
    most = 0
    for n in range(Z, LENGTH + 1, Z):
        assert cache.extend(lease, n)
        cache.publish(lease, range(n), n)
        cache.slide(lease, n)
        most = max(most, cache.pool.n_usable - cache.pool.n_free)
    cache.check([lease])
    assert most * kv.page_bytes <= 1.1 * NEEDED[name]
    assert NEEDED[name] <= most * kv.page_bytes


@pytest.mark.parametrize("name", MODELS)
def test_host_memory_at_32k_holds_all_of_full_groups_and_two_windows(tmp_path, name):
    _, laid = planned(tmp_path, name)
    limits, kv = laid.sizes.limits, laid.sizes.kv
    full, window = limits.reaches
    cache = GroupedCache(
        limits.reaches,
        PageDemand.of(limits.reaches, Z, 3),
        n_pages=2000,
        n_slots=1,
        pages_per_slot=1 + LENGTH // Z,
        n_host_pages=9000,
    )
    text = range(LENGTH)
    lease = cache.match(("", "", None), text, slot=0)
    for n in range(Z, LENGTH + 1, Z):
        assert cache.extend(lease, n)
        cache.publish(lease, text, n)
        cache.slide(lease, n)
    cache.release(lease)
    cache.evict(9000)
    assert cache.tier is not None
    saved = full.n_groups * LENGTH // Z + window.n_groups * 2 * window.span.most // Z
    assert len(cache.tier) == saved
    assert saved * kv.page_bytes <= 1.4 * NEEDED[name]
    assert len([move for move in cache.moves(0) if move.out]) == saved
    cache.landed(0)
    # A hit brings back what its next token reads.
    lease = cache.match(("", "", None), [*text, 1], slot=0)
    assert lease.capacity == LENGTH
    assert cache.admit(lease, [LENGTH + 1] * 2)
    read = full.n_groups * LENGTH // Z + window.n_groups * window.span.most // Z
    assert len(cache.moves(1)) == read
    cache.check([lease])


def test_padding_of_groups_is_said(tmp_path):
    found, _ = planned(tmp_path, "gemma-3-1b")
    full, windows = found.kv_groups
    assert (full.layers, full.arrays, windows.layers, windows.arrays) == (4, 4, 22, 24)
    console = Console(width=show.WIDTH, record=True)
    show.as_text(found, console)
    text = console.export_text()
    assert "22 layers read windows of 512: 6 groups of 4 (2 of 24 places empty)" in text
    assert "4 layers read all tokens: 1 group of 4" in text


def test_host_memory_holds_pages_of_groups(tmp_path):
    found, laid = planned(tmp_path, "gpt-oss-20b", host_memory_gb=1.0)
    assert [group.arrays for group in found.kv_groups] == [12, 12]
    # layers of a group * tokens of a page * (keys and values) * heads * width * bytes
    assert laid.sizes.limits.n_host_pages == 2**30 // (12 * Z * 2 * 8 * 64 * 2)


def test_a_context_within_all_windows_has_no_groups(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["gemma-3-27b"]))
    config = EngineConfig.of(max_model_len=1024)
    assert sizing.plan(str(path), "h200", (512,), config)[0].kv_groups == ()
