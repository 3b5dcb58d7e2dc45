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
from jserve.sizing import show_compare
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_command_simulates_a_load_over_the_prices() -> None:
    words = ["--spec", "tp=1", "--spec", "dp=2,tp=1", "--simulate", "--json"]
    load = ["--trace", "rate=200,n=60,prompt=200,output=20", "--dtype", "bfloat16"]
    done = CliRunner().invoke(app, ["bench", "shard", "llama-3.1-8b", *words, *load])
    assert done.exit_code == 0, done.output
    one, two = (row["simulated"] for row in json.loads(done.stdout)["specs"])
    assert 0 < two["ttft_p99_ms"] < one["ttft_p99_ms"]
    assert two["output_tok_s"] > one["output_tok_s"]
    assert one["usd_per_m_tokens"] is None, "nobody said what a device costs"
    dear = CliRunner().invoke(
        app, ["bench", "shard", "llama-3.1-8b", *words, *load, "--hour-usd", "3.6"]
    )
    for n, row in enumerate((row["simulated"] for row in json.loads(dear.stdout)["specs"]), 1):
        usd = n * 3.6 * 1e6 / (3600 * row["output_tok_s"])
        assert row["usd_per_m_tokens"] == pytest.approx(usd, rel=1e-3)
        assert row["device_hours_per_m_tokens"] == pytest.approx(usd / 3.6, rel=1e-3)


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


@pytest.mark.slow
def test_the_plot_has_a_bar_for_each_sharding(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["--spec", "tp=1", "--spec", "tp=2", "--plot", str(tmp_path / "shard.svg")]
    done = CliRunner().invoke(app, ["bench", "shard", MINI, *words])
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "shard.svg").read_text()
    assert {"tp=1", "tp=2", "collectives"} <= {*re.findall(r">([^<>]+)</text>", drawn)}
    load = ["--simulate", "--trace", "rate=9,n=4,prompt=8,output=4", "--hour-usd", "2"]
    done = CliRunner().invoke(app, ["bench", "shard", MINI, *words, *load])
    assert done.exit_code == 0, done.output
    seen = {"output_tok_s": 12.3, "device_hours_per_m_tokens": 1.5, "usd_per_m_tokens": None}
    assert show_compare._cost_in_short(seen) == "12; 1.500 h"
    assert show_compare._cost_in_short(seen | {"usd_per_m_tokens": 3.0}) == "12; 1.500 h, $3.000"
    said = re.findall(r">([^<>]+)</text>", (tmp_path / "shard.svg").read_text())
    assert "$ a million output tokens, simulated" in said
    refused = CliRunner().invoke(app, ["bench", "shard", MINI, *words[:-1], "shard.png"])
    assert refused.exit_code == 2 or isinstance(refused.exception, ConfigError)


@pytest.mark.parametrize("words", [["--hour-usd", "2"], ["--simulate", "--hour-usd", "-1"]])
def test_a_price_that_prices_nothing_is_refused(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "shard", MINI, "--spec", "tp=1", *words])
    assert done.exit_code == 2
    assert "hour_usd" in done.output


def test_what_runs_here_has_panels_of_its_own(tmp_path: Path) -> None:
    """A program's time apart from that of its exposed collectives; none of mode auto."""
    pytest.importorskip("matplotlib")
    program = {"collectives": 3, "collective_mib": 0.5, "exposed_ms": 2.0, "step_ms": 5.0}
    made = {**rows((1.0, 10.0))[0], "refused": ""}
    made["steps"] = [{"step_ms": 2.0, "collective_ms": 1.0}] * 2
    live = {"step_ms": 9.0, "programs": [program, program]}
    both = [made | {"spec": "tp=2", "live": live}]
    whole = program | {"exposed_ms": None}
    both += [made | {"spec": "by XLA", "live": live | {"programs": [whole, whole]}}]
    show_compare.draw(both, tmp_path / "a.svg", "title")
    said = re.findall(r">([^<>]+)</text>", (tmp_path / "a.svg").read_text())
    assert said.count("exposed collectives") == 2
    assert "ms, program of 8 sequences, here" in said
    assert said.count("tp=2") == 5
    assert said.count("by XLA") == 3
    assert show_compare._program_in_short(program) == "3, 0.50, 2.00; 5.00"
    assert show_compare._program_in_short(whole) == "3, 0.50, -; 5.00"


def test_one_device_has_no_collectives() -> None:
    [decode, _] = priced(MINI, "tp=1", "h200").steps
    assert (decode.collectives, decode.collective_ms) == (0, 0.0)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "spec"),
        (["--spec", "tp=2", "--lengths", "x"], "lengths"),
        (["--spec", "tp=2", "--lengths", "1000k"], "lengths"),
        (["--spec", "tp=2", "--device", "tpu"], "device"),
        (["--spec", "tp=2", "--sharding", "tp=2"], "sharding"),
    ],
)
def test_bad_input_is_one_line_that_names_the_option(words: list[str], name: str) -> None:
    done = CliRunner().invoke(app, ["bench", "shard", MINI, *words])
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert name in (done.output + str(done.exception))


UNEVEN = '{"mesh":{"x":3},"rules":{"ffn":"x"}}'


def test_a_sharding_that_cannot_be_honoured_is_a_row_that_says_why() -> None:
    words = [word for spec in ("tp=2", UNEVEN, "tp=x") for word in ("--spec", spec)]
    done = CliRunner().invoke(app, ["bench", "shard", MINI, *words, "--json"])
    assert done.exit_code == 1, done.output
    good, uneven, none = json.loads(done.stdout)["specs"]
    assert good["refused"] == ""
    assert len(good["steps"]) == 2
    assert uneven["refused"].startswith("sharding.rules.ffn: ")
    assert "steps" not in uneven
    assert none["refused"].startswith("sharding ")
    shown = CliRunner().invoke(app, ["bench", "shard", MINI, *words])
    assert shown.exit_code == 1
    assert f"{UNEVEN} is refused: sharding.rules.ffn" in shown.output.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([MINI, "--spec", "dp=9,tp=1", "--live"], "sharding.mesh: 9 devices"),
        (["llama-3.1-70b", "--spec", "tp=1", "--device", "h100", "--simulate"], "leave no room"),
    ],
)
def test_what_only_a_run_cannot_have_is_in_the_row_beside_its_prices(
    words: list[str], why: str
) -> None:
    load = ["--trace", "rate=9,n=2,prompt=8,output=2", "--json"]
    done = CliRunner().invoke(app, ["bench", "shard", *words, *load])
    assert done.exit_code == 1, done.output
    [row] = json.loads(done.stdout)["specs"]
    assert why in row["refused"]
    assert len(row["steps"]) == 2
    assert not {"live", "simulated"} & {*row}


def test_kv_that_fits_beside_the_weights() -> None:
    """8 kv heads of 64 in 16 layers, bfloat16: 32,768 bytes a token, split where the heads are."""
    name, config = "llama-3.2-1b", EngineConfig()
    whole = {"mesh": {"x": 4}, "rules": {"ffn": "x"}}
    found = {}
    for spec, token_bytes in (("tp=4", 8192), ("tp=16", 4096), (whole, 32768)):
        kv = found[str(spec)] = priced(name, spec, "h200", lengths=(2048, 8192)).kv
        assert kv.token_bytes == token_bytes
        assert kv.pages is not None
        page_size = config.on("cuda").cache.page_size
        held = {n: (kv.pages - 1) // (n // page_size) for n in (2048, 8192)}
        assert kv.sequences == held
    assert found["tp=4"].pages == simulation(name, "tp=4", "h200", config).device.n_pages
    narrow = EngineConfig.of(kv_cache_dtype="fp8_e4m3")
    assert priced(name, "tp=1", "h200", narrow).kv.token_bytes == 16384


def test_kv_where_there_is_no_room_and_where_nobody_says_how_much() -> None:
    none = priced("llama-3.1-70b", "tp=1", "h100", lengths=(2048,)).kv
    assert (none.pages, none.sequences) == (0, {2048: 0})
    unknown = priced(MINI, "tp=2", "cpu").kv
    assert (unknown.pages, unknown.sequences) == (None, None)
    said = priced(MINI, "tp=2", "cpu", EngineConfig.of(n_pages=9, page_size=16), lengths=(32,)).kv
    assert (said.pages, said.sequences) == (9, {32: 4})


def test_all_figures_as_json() -> None:
    done = CliRunner().invoke(
        app, ["bench", "shard", MINI, "--spec", "tp=1", "--spec", "tp=2", "--json"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["specs"]
    assert [row["spec"] for row in rows] == ["tp=1", "tp=2"]
    assert rows[0]["device_bytes"] > rows[1]["device_bytes"]
