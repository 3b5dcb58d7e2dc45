"""Prices of shardings side by side, against arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jserve.cli import app
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.shard_commands import _rank_correlation
from jserve.sim.roofline import CHIPS
from jserve.sizing.compare import ShardedCosts, priced, simulation
from jserve.sizing.explain import explain_sharding
from jserve.sizing.models import find

MINI, CHIP = "checkpoints/jserve-mini", CHIPS["h200"]


def test_a_step_is_weights_then_collectives() -> None:
    found, arch = priced(MINI, "tp=4", "h200"), find(MINI).arch
    decode, prefill = found.steps
    assert (decode.decode_rows, prefill.prefill_tokens) == (8, 256)
    assert decode.collectives == 2 * arch.L + 2
    sums = (2 * arch.L + 1) * 8 * arch.D * 4
    logits = 8 * arch.V * 4
    assert decode.collective_mib == pytest.approx((sums + logits) / 2**20)
    sent = (2 * sums + logits) * 3 / 4
    links = decode.collectives * CHIP.link_s + sent / CHIP.link_bytes_per_s
    assert decode.collective_ms == pytest.approx(1e3 * links)
    read = found.device_bytes / CHIP.bytes_per_s / CHIP.reached
    assert decode.step_ms == pytest.approx(1e3 * (read + links + CHIP.step_s))


def test_sums_in_bfloat16_send_half() -> None:
    """In twice as many collectives, so at 256 tokens that is worth little."""
    wide, narrow = (
        priced("llama-3.1-8b", {"mesh": {"tp": 8}, "sums": sums}, "h200").steps[1]
        for sums in ("float32", "weights")
    )
    arch = find("llama-3.1-8b").arch
    gathered = 3 * arch.V * 4 * 7 / 8 / CHIP.link_bytes_per_s
    sent = [p.collective_ms / 1e3 - p.collectives * CHIP.link_s - gathered for p in (wide, narrow)]
    assert sent[1] == pytest.approx(sent[0] / 2, rel=1e-6)
    assert narrow.collectives == 2 * wide.collectives - 1


def test_a_simulation_takes_the_priced_collectives_and_a_devices_weights() -> None:
    config = EngineConfig.of()
    found = priced("llama-3.1-8b", "tp=4", "h200")
    setup = simulation("llama-3.1-8b", "tp=4", "h200", config)
    costs = setup.device.costs
    assert isinstance(costs, ShardedCosts)
    for step, tokens in zip(found.steps, (8, 256), strict=True):
        links = costs.link_s + costs.link_token_s * tokens
        assert links * 1e3 == pytest.approx(step.collective_ms)
        assert costs.seconds(tokens, 0, 1) * 1e3 == pytest.approx(step.step_ms, rel=0.1)
    assert costs.share == pytest.approx(1.0, rel=0.01)
    one = simulation("llama-3.1-8b", "tp=1", "h200", config).device
    assert 4.0 < setup.device.n_pages / one.n_pages < 5.0, "a page is a quarter, weights too"
    assert simulation("llama-3.1-8b", "dp=2,tp=2", "h200", config).replicas == 2
    whole = {"mesh": {"x": 4}, "rules": {"ffn": "x"}}
    unsplit = simulation("llama-3.1-8b", whole, "h200", config).device
    assert unsplit.costs.seconds(8, 0, 1) > costs.seconds(8, 0, 1)
    with pytest.raises(ConfigError) as caught:
        simulation("llama-3.1-70b", "tp=1", "h100", config)
    assert caught.value.field == "memory_utilization"


def test_the_command_simulates_a_load_over_the_prices() -> None:
    words = ["--spec", "tp=1", "--spec", "dp=2,tp=1", "--simulate", "--json"]
    load = ["--trace", "rate=200,n=60,prompt=200,output=20", "--dtype", "bfloat16"]
    done = CliRunner().invoke(app, ["bench", "shard", "llama-3.1-8b", *words, *load])
    assert done.exit_code == 0, done.output
    one, two = (row["simulated"] for row in json.loads(done.stdout)["specs"])
    assert 0 < two["ttft_p99_ms"] < one["ttft_p99_ms"]
    assert two["output_tok_s"] > one["output_tok_s"]


def test_devices_that_share_a_machine_work_one_after_the_other() -> None:
    one, four = (priced(MINI, f"tp={n}", "cpu").steps[0] for n in (1, 4))
    chip = CHIPS["cpu"]
    assert four.step_ms > one.step_ms
    assert four.step_ms - four.collective_ms == pytest.approx(one.step_ms, rel=0.1)
    alone = four.collectives * chip.link_s * 1e3
    assert four.collective_ms > 4 * alone
    config = EngineConfig.of(n_pages=64)
    for n, step in ((1, one), (4, four)):
        costs = simulation(MINI, f"tp={n}", "cpu", config).device.costs
        assert costs.seconds(8, 0, 1) * 1e3 == pytest.approx(step.step_ms, rel=0.1)


def test_groups_of_one_machine_take_turns_too() -> None:
    one, two = (priced(MINI, spec, "cpu").steps[0] for spec in ("tp=2", "dp=2,tp=2"))
    chip = CHIPS["cpu"]
    assert two.step_ms - chip.step_s * 1e3 == pytest.approx(2 * (one.step_ms - chip.step_s * 1e3))
    apart = [priced(MINI, spec, "h200").steps[0].step_ms for spec in ("tp=2", "dp=2,tp=2")]
    assert apart[0] == apart[1]


def test_collectives_of_branches_that_few_steps_take_are_told_apart_and_not_priced() -> None:
    """Over a split vocabulary a step that is greedy exchanges the best of each part and no more; truncation and
    log-probabilities gather the 64 and 20 largest of each."""
    spec = {"mesh": {"tp": 4}, "logits": "split"}
    decode = explain_sharding(MINI, spec).programs[0]
    rare = [c for c in decode.collectives or () if c.rare]
    assert {c.op for c in rare} == {"all-reduce", "all-gather"}
    assert {c.op for c in decode.usual} == {"all-reduce"}
    arch = find(MINI).arch
    assert sum(c.count for c in decode.usual) == 2 * arch.L + 1 + 3
    assert priced(MINI, spec, "h200").steps[0].collectives == 2 * arch.L + 1 + 3
    assert not [
        c for p in explain_sharding(MINI, "tp=4").programs for c in p.collectives or () if c.rare
    ]


def rows(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"steps": [{"step_ms": a}], "live": {"step_ms": b}} for a, b in pairs]


def test_the_rank_correlation_is_spearmans() -> None:
    assert _rank_correlation(rows((1.0, 10.0), (2.0, 30.0), (9.0, 70.0))) == 1.0
    assert _rank_correlation(rows((1.0, 3.0), (2.0, 2.0), (3.0, 1.0))) == -1.0
    # scipy.stats.spearmanr([1, 2, 2, 4], [1, 3, 2, 4])
    assert _rank_correlation(rows((1, 1), (2, 3), (2, 2), (4, 4))) == pytest.approx(0.949, abs=1e-3)
    assert _rank_correlation(rows((1.0, 1.0))) is None
    assert _rank_correlation(rows((1.0, 1.0), (1.0, 2.0))) is None
    assert _rank_correlation([{"steps": [], "live": {"step_ms": 1.0}}] * 2) is None


def test_the_plot_has_a_bar_for_each_sharding(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["--spec", "tp=1", "--spec", "tp=2", "--plot", str(tmp_path / "shard.svg")]
    done = CliRunner().invoke(app, ["bench", "shard", MINI, *words])
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "shard.svg").read_text()
    assert {"tp=1", "tp=2", "collectives"} <= {*re.findall(r">([^<>]+)</text>", drawn)}
    refused = CliRunner().invoke(app, ["bench", "shard", MINI, *words[:-1], "shard.png"])
    assert refused.exit_code == 2 or isinstance(refused.exception, ConfigError)


def test_one_device_has_no_collectives() -> None:
    [decode, _] = priced(MINI, "tp=1", "h200").steps
    assert (decode.collectives, decode.collective_ms) == (0, 0.0)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "spec"),
        (["--spec", "tp=x"], "sharding"),
        (["--spec", "tp=2", "--device", "tpu"], "device"),
        (["--spec", "tp=2", "--sharding", "tp=2"], "sharding"),
    ],
)
def test_bad_input_is_one_line_that_names_the_option(words: list[str], name: str) -> None:
    done = CliRunner().invoke(app, ["bench", "shard", MINI, *words])
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert name in (done.output + str(done.exception))


def test_all_figures_as_json() -> None:
    done = CliRunner().invoke(
        app, ["bench", "shard", MINI, "--spec", "tp=1", "--spec", "tp=2", "--json"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["specs"]
    assert [row["spec"] for row in rows] == ["tp=1", "tp=2"]
    assert rows[0]["device_bytes"] > rows[1]["device_bytes"]
