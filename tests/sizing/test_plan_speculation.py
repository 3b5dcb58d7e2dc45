"""Plans of engines that speculate: against the engine that would be started, and figures by hand."""

from __future__ import annotations

import dataclasses
import io
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jserve.cli import app
from jserve.config import DEVICE_SHARE, EngineConfig
from jserve.errors import ConfigError
from jserve.model.arch import resized
from jserve.model.draft_tree import chain, paths
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.runner.buckets import Ladder
from jserve.runner.memory import DeviceMemory
from jserve.runner.programs import step_name
from jserve.runner.runner import ModelRunner
from jserve.runner.sizes import ladder_of
from jserve.shapes import SHAPES
from jserve.sim.roofline import CHIPS, Roofline
from jserve.sizing import plan as sizing, show
from jserve.sizing.models import find
from jserve.sizing.speculation import DraftCosts, DraftRate, Speculated, inner_of, tokens_per_step
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.eagle3 import eagle3
from jserve.speculation.drafters.load import load_speculation
from jserve.speculation.drafters.medusa import medusa
from jserve.speculation.host.methods import shape
from jserve.weights.dummy import draw_all
from jserve.weights.source import resolve
from tests.sizing.test_plan import SMALL, TINY, plan

HEADS: dict[str, dict[str, Any]] = {
    "draft": TINY | {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
                     "hidden_size": 24, "head_dim": 8},
    "eagle3": TINY | {"num_hidden_layers": 1, "draft_vocab_size": 128, "tie_word_embeddings": False,
                      "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}},
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": 64, "vocab_size": 256},
}  # fmt: skip
"""The draft model cannot be split over two devices, the others can."""


def started(config: EngineConfig, tp: int) -> ModelRunner:
    """The runner of that config with one program instead of all."""
    model, mesh, rules = find(config.model.model), make_mesh(tp), ShardRules()
    params = draw_all(model.family.specs(model.arch, tp), 0, mesh, rules, model.dtype)
    options = config.speculative
    drafts = load_speculation(
        options.method,
        resolve(options.model, "", "dummy"),
        model.arch,
        mesh,
        rules,
        model.dtype,
        shape=partial(shape, options),
        tensor_parallel_size=options.tensor_parallel_size,
    )
    one = Ladder(buckets=(Bucket(D=2, P=0, F=0),))
    given = (model.family, model.arch, params, mesh, config)
    return ModelRunner(*given, rules=rules, ladder=one, speculation=drafts)


def of_one_device(arrays: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(arrays))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tp", "options"),
    [
        ("draft", 1, {"num_tokens": 3}),
        ("draft", 2, {}),
        ("eagle3", 1, {"tree": "auto", "num_tokens": 9}),
        ("eagle3", 2, {"tensor_parallel_size": 2, "num_tokens": 4}),
        ("eagle3", 2, {"tensor_parallel_size": 1, "num_tokens": 4}),
        ("medusa", 1, {}),
        ("medusa", 2, {"tensor_parallel_size": 1}),
    ],
)
def test_the_engine_allocates_what_the_plan_says(
    method: str, tp: int, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, KV pool and slots of one device, and the list of programs."""
    for name, config in (("target", TINY), ("head", HEADS[method])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    total = 8 << 20
    chip = dataclasses.replace(CHIPS["h200"], memory=(total + 0.5) / DEVICE_SHARE)
    monkeypatch.setitem(sizing.CHIPS, "h200", chip)
    taken = DeviceMemory(total=total, taken=0, is_host=False)
    monkeypatch.setattr(DeviceMemory, "of", lambda _: taken)
    config = EngineConfig.of(
        model=str(tmp_path / "target"),
        tensor_parallel_size=tp,
        speculative={"method": method, "model": str(tmp_path / "head"), **options},
        **SMALL,
    )
    found, laid = sizing.plan(config.model.model, "h200", (100,), config)
    runner = started(config, tp)
    said = found.speculation
    assert said is not None
    assert runner.speculation is not None
    assert found.memory == runner.memory
    assert of_one_device(runner.state.kv) == found.memory.kv_bytes
    assert of_one_device(runner.state.slots) == found.memory.slot_bytes
    assert of_one_device(runner.speculation.params) == said.weight_bytes
    assert of_one_device((runner.params, runner.speculation.params)) == found.memory.weight_bytes
    assert runner.state.slots.draft_CJ is not None
    assert of_one_device(runner.state.slots.draft_CJ) == said.slot_bytes
    drafted = of_one_device(runner.state.kv[runner.model.arch.L :])
    assert drafted == said.kv_bytes_per_token * found.memory.n_pages * laid.sizes.dims.Z
    limits = dataclasses.replace(runner.limits, draft_rows=said.draft_rows)
    names = [step_name(b) for b in ladder_of(limits, said.tree, masks_drafts=False).buckets]
    assert [p.name for p in found.programs] == names
    whole = method == "draft" or options.get("tensor_parallel_size") == 1
    assert said.devices == (1 if whole else tp)


# --- by hand

DRAFT = {"method": "draft", "model": "llama-3.2-1b", "num_tokens": 3}


def rate_of(found: sizing.Plan, batch: int, context: int) -> DraftRate:
    assert found.speculation is not None
    return next(r for r in found.speculation.rates if (r.batch, r.context) == (batch, context))


def test_a_draft_model_beside_8b_on_an_h200() -> None:
    """One row at 512 tokens verifies 3 drafts and leaves 3: the 1B model sees 4 tokens, then passes over
    one token three times and draws each time."""
    found = sizing.plan(
        "llama-3.1-8b", "h200", (512,), EngineConfig.of(speculative=DRAFT), acceptance=0.8
    )[0]
    said, plain = found.speculation, plan()
    assert said is not None
    assert said.weight_bytes == 2 * 1_235_814_400
    assert said.kv_bytes_per_token == 32 * 1024
    assert found.memory.weight_bytes == plain.memory.weight_bytes + said.weight_bytes
    assert found.kv_bytes_per_token == plain.kv_bytes_per_token + 32 * 1024
    assert found.memory.n_pages < plain.memory.n_pages
    assert found.memory.slot_bytes - plain.memory.slot_bytes == said.slot_bytes == 256 * 3 * 4
    rate = rate_of(found, 1, 512)
    assert (rate.width, rate.tokens_per_step) == (4, pytest.approx(1 + 0.8 + 0.64 + 0.512))
    weights = 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    verify = (weights + (512 + 4) * 131_072) / 4.3e12 / 0.7 + 3e-4
    assert rate.verify_ms == pytest.approx(verify * 1e3, rel=1e-6)
    table = 128_256 * 2048
    body = 1_235_814_400 - table  # its norms, too
    seen = 2 * body + (512 + 4) * 32_768
    one = 2 * (body + table) + (512 + 1) * 32_768
    draft = (seen + 3 * one) / 4.3e12 / 0.7 + 4 * 3e-4 * 17 / 33
    assert rate.draft_ms == pytest.approx(draft * 1e3, rel=1e-6)
    assert rate.expected_tok_s == pytest.approx(rate.tokens_per_step / (verify + draft))
    alone = next(r for r in found.rates if (r.batch, r.context) == (1, 512))
    assert rate.speed_up == pytest.approx(rate.expected_tok_s / alone.expected_tok_s)
    assert rate_of(found, 64, 512).width == 1, "above 32 rows it does not draft"
    program = next(p for p in found.programs if p.name == "step_D1_P0_F0_J4_n3")
    assert program.drafts == 3
    assert program.weight_bytes == pytest.approx(weights + 2 * (4 * body + 3 * table))
    assert program.logits_bytes == 4 * 128_256 * 4


def test_what_never_stands_is_never_drafted() -> None:
    def widths(acceptance: float) -> set[int]:
        config = EngineConfig.of(speculative=DRAFT | {"num_tokens": 7})
        said = sizing.plan("llama-3.1-8b", "h200", (512,), config, acceptance)[0].speculation
        assert said is not None
        return {r.width for r in said.rates if r.batch <= 32}

    assert widths(0.0) == {1}
    assert widths(1.0) == {8}
    assert 4 in widths(0.7)


ARCH = family_for(SHAPES["llama-3.1-8b"]).arch(SHAPES["llama-3.1-8b"])
LINE = Roofline(arch=ARCH, itemsize=2, chip=CHIPS["h200"], kv_itemsize=2, tp=1)
D, V, F = 4096, 128_256, 14_336


def test_an_eagle_head_reads_its_layer_for_each_level() -> None:
    """The first level follows from what it saw; a level of two nodes is one pass over both."""
    head = resized(ARCH, L=1, V=32_000)
    made = DraftCosts.of(eagle3(head, ARCH, taps=(2, 16, 29), own_embed=False), LINE)
    layer = (2 * D) * 6144 + D * D + 3 * D * F + 4 * D
    assert made.n_passed == layer
    assert made.n_seen == layer + 3 * D * D
    assert made.n_drawn == 32_000 * D
    tree = (0, 0, 0, 1, 1, 2, 4)
    works = made.works(2, 16, 1000, tree)
    assert inner_of(tree) == [1, 2, 1]
    reads = [made.n_seen, made.n_drawn, layer + made.n_drawn, layer + made.n_drawn]
    assert [w.weight_bytes for w in works] == [2 * n for n in reads]
    entry = 2 * 8 * 128 * 2
    assert [w.kv_bytes for w in works] == [
        entry * n for n in (2 * 1000 + 16, 0, 2 * 1000 + 4, 2 * 1000 + 2)
    ]
    assert works[2].flops == 2 * layer * 4 + 2 * made.n_drawn * 4 + 4 * 32 * 128 * 4 * 1000


def test_medusa_reads_a_head_for_each_draft() -> None:
    made = DraftCosts.of(medusa(ARCH, n_heads=4), LINE)
    assert (made.n_seen, made.n_passed, made.n_drawn) == (0, 0, D * D + D + V * D)
    works = made.works(1, 4, 1000, chain(3))
    assert [w.weight_bytes for w in works] == [2 * made.n_drawn] * 3
    assert {w.kv_bytes for w in works} == {0}
    shared = DraftCosts.of(medusa(ARCH, n_heads=4, own_unembed=False), LINE)
    assert shared.n_drawn == made.n_drawn


def test_a_drafter_held_whole_reads_all_of_itself_and_sends_nothing() -> None:
    line = dataclasses.replace(LINE, tp=4)
    split = draft_model(family_for(SHAPES["llama-3.2-1b"]), ARCH, ARCH)
    whole = dataclasses.replace(split, replicated=True)
    parts, alone = (DraftCosts.of(d, line).works(1, 4, 0, chain(1)) for d in (split, whole))
    for part, one in zip(parts, alone, strict=True):
        assert 4 * part.weight_bytes == one.weight_bytes
        assert part.n_collectives > 0 == one.n_collectives
        assert part.link_bytes > 0 == one.link_bytes


@pytest.mark.parametrize("parents", [(0, 1, 2), (0, 0, 1, 1, 2), (0, 0, 0, 1, 4)])
def test_tokens_of_a_tree_are_those_of_all_texts_weighed(parents: tuple[int, ...]) -> None:
    """Every way the text can go on is a rank at each depth (3: none of the ranks)."""
    by_rank = (0.5, 0.2, 0.1)
    ranks = {(): 0} | {
        tuple(sum(p == parents[n - 1] for p in parents[: n - 1]) for n in path): len(path)
        for path in paths(parents)[1:]
    }
    expected = 0.0
    for text in product(range(4), repeat=4):
        chance = 1.0
        for r in text:
            chance *= (*by_rank, 0.2)[r]
        expected += chance * (1 + max(n for r, n in ranks.items() if text[:n] == r))
    assert tokens_per_step(parents, by_rank) == pytest.approx(expected)


def test_chances_by_rank_share_what_the_first_leaves() -> None:
    def chances(acceptance: float | None, **options: Any) -> tuple[float, ...]:
        config = EngineConfig.of(speculative={"method": "ngram"} | options)
        said = sizing.plan("llama-3.2-1b", "h200", (512,), config, acceptance)[0].speculation
        assert isinstance(said, Speculated)
        return said.chances

    assert chances(None) == pytest.approx((0.60, 0.15, 0.07, 0.04, 0.03))
    assert chances(0.8) == pytest.approx((0.80, 0.075, 0.035, 0.02, 0.015))
    assert chances(1.0)[1:] == (0, 0, 0, 0)
    measured = DRAFT | {"tree": "auto", "tree_chances": [0.5, 0.25]}
    assert chances(None, **measured) == (0.5, 0.25)


def test_drafts_of_the_host_are_verified_for_nothing_else() -> None:
    config = EngineConfig.of(speculative={"method": "suffix", "num_tokens": 7})
    found = sizing.plan("llama-3.1-8b", "h200", (512,), config)[0]
    assert found.speculation is not None
    assert (found.speculation.weight_bytes, found.speculation.drafter) == (0, "")
    assert found.memory == plan(lengths="512").memory
    assert {r.draft_ms for r in found.speculation.rates} == {0.0}
    assert rate_of(found, 1, 512).width == 8


def test_prompt_lookup_keeps_the_text_in_the_slots_and_costs_no_time() -> None:
    config = EngineConfig.of(speculative={"method": "ngram", "num_tokens": 7})
    found, plain = sizing.plan("llama-3.1-8b", "h200", (512,), config)[0], plan(lengths="512")
    said = found.speculation
    assert said is not None
    assert (said.weight_bytes, said.kv_bytes_per_token, said.drafter) == (0, 0, "")
    assert said.slot_bytes == 256 * (7 + min(16384, 131_072)) * 4
    assert found.memory.slot_bytes - plain.memory.slot_bytes == said.slot_bytes
    assert {r.draft_ms for r in said.rates} == {0.0}
    assert rate_of(found, 64, 512).width == 1, "above 32 rows it does not draft"
    assert any(p.name == "step_D1_P0_F0_J8_n7" for p in found.programs)


@pytest.mark.parametrize(
    ("options", "acceptance", "field", "words"),
    [
        ({}, 0.5, "acceptance", "means nothing without"),
        ({"speculative": "ngram"}, 1.5, "acceptance", "must be 0 to 1, not 1.5"),
        ({"speculative": "ngram"}, float("nan"), "acceptance", "must be 0 to 1"),
        ({"speculative": "draft"}, None, "speculative.model", "needs a model"),
        (
            {"speculative": {"method": "draft", "model": "nowhere"}},
            None,
            "speculative.model",
            "known shapes",
        ),
        (
            {"speculative": {"method": "draft", "model": "qwen3-8b"}},
            None,
            "speculative.model",
            "vocab_size is 151936, the target's is 128256",
        ),
        (
            {"speculative": DRAFT | {"tensor_parallel_size": 2}, "tensor_parallel_size": 4},
            None,
            "speculative.tensor_parallel_size",
            "on its 4 devices",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    options: dict, acceptance: float | None, field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        sizing.plan("llama-3.1-8b", "h200", (512,), EngineConfig.of(**options), acceptance)
    assert caught.value.field == field


def test_tables_and_json_say_the_same() -> None:
    options = DRAFT | {"num_tokens": 7, "draft_tensor_parallel_size": 2}
    asked = ["plan", "llama-3.1-8b", "--tp", "2", "--speculative", json.dumps(options)]
    done = CliRunner().invoke(app, [*asked, "--acceptance", "0.9", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["speculation"]
    assert (said["acceptance"], said["devices"], said["n_drafts"]) == (0.9, 2, 7)
    shown = CliRunner().invoke(app, [*asked, "--acceptance", "0.9"]).stdout
    assert "the drafter (draft llama-3.2-1b), split over 2 devices, 7 drafts" in shown
    assert "80 KiB a token, 16 of them the drafter's" in shown
    assert "with drafts by draft at acceptance 0.9" in shown
    assert "(no drafts)" in shown
    best = next(r for r in said["rates"] if (r["batch"], r["context"]) == (1, 512))
    terms = f"{best['tokens_per_step']:.2f} / {best['verify_ms']:.2f} + {best['draft_ms']:.2f}"
    assert terms in shown


def test_heads_of_real_files_are_planned_by_what_they_hold() -> None:
    """The shipped head has no embedding of its own and a draft vocabulary; config.json alone would do."""
    root = Path(__file__).parents[2] / "checkpoints"
    for head, method in (("jserve-mini-eagle3", "eagle3"), ("jserve-mini-medusa", "medusa")):
        config = EngineConfig.of(speculative={"method": method, "model": str(root / head)})
        found = sizing.plan(str(root / "jserve-mini"), "cpu", (256,), config)[0]
        assert found.speculation is not None
        held = sum(f.stat().st_size for f in (root / head).glob("*.safetensors"))
        assert 0.8 * held < found.speculation.weight_bytes <= held
        console = Console(width=show.WIDTH, record=True, file=io.StringIO())
        show.as_text(found, console)
        assert f"the drafter ({method}" in console.export_text()
