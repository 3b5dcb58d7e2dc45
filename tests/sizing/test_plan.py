"""The plan against figures worked out by hand, and against the engine that would be started."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jserve import build, build_runner
from jserve.cli import app
from jserve.config import DEVICE_SHARE, EngineConfig
from jserve.errors import ConfigError
from jserve.model.families import ARCHITECTURES
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.runner.buckets import Ladder
from jserve.runner.memory import DeviceMemory
from jserve.runner.programs import step_name
from jserve.runner.runner import ModelRunner
from jserve.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS
from jserve.shapes import SHAPES
from jserve.sim.roofline import CHIPS
from jserve.sizing import plan as sizing, show
from jserve.sizing.models import find
from jserve.weights.dummy import draw_all

PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "granite-3.0-1b-a400m": 1_334_628_352,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2b": 2_506_172_416,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 2_950_272,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 6_194_304,
    "phi-4-mini": 3_836_021_760,
    "olmo-2-7b": 7_298_617_344,
    "granite-3.3-8b": 8_170_864_640,
    "command-r7b": 8_028_033_024,
    "smollm3-3b": 3_075_098_624,
    "exaone-4-32b": 32_003_216_384,
    "glm-4-9b": 9_400_279_040,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "llama-4-scout": 108_641_793_536 - 871_932_416,
    "llama-4-maverick": 401_583_781_376 - 871_932_416,
    "mistral-7b": 7_248_023_552,
}
"""As their publishers count them; of multimodal ones less what sees images, and less its projector."""


def plan(
    name: str = "llama-3.1-8b", device: str = "h200", lengths: str = "", **flat
) -> sizing.Plan:
    config = EngineConfig.of(**flat)
    return sizing.plan(name, device, sizing.lengths_of(lengths), config)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert find(name).n_params == PARAMETERS[name]


def test_every_family_has_a_known_shape() -> None:
    assert {find(name).family.name for name in SHAPES} == {*ARCHITECTURES.values()}


PLANS: dict[str, tuple[float, int, dict[int, int]]] = {
    "gemma-2b": (2.506, 2 * 18 * 1 * 256, {}),
    "gemma-2-9b": (9.241, 2 * 42 * 8 * 256, {}),
    "gemma-3-1b": (1.000, 2 * 26 * 1 * 256, {512: 22, 0: 4}),
    "gemma-3-27b": (27.008, 2 * 62 * 16 * 128, {1024: 52, 0: 10}),
    "phi-4-mini": (3.836, 2 * 32 * 8 * 128, {}),
    "olmo-2-7b": (7.298 - 0.411, 2 * 32 * 32 * 128, {}),
    "granite-3.3-8b": (8.170, 2 * 40 * 8 * 128, {}),
    "command-r7b": (8.028, 2 * 32 * 8 * 128, {4096: 24, 0: 8}),
    "smollm3-3b": (3.075, 2 * 36 * 4 * 128, {}),
    "exaone-4-32b": (32.003 - 0.524, 2 * 64 * 8 * 128, {4096: 48, 0: 16}),
    "glm-4-9b": (9.400 - 0.621, 2 * 40 * 2 * 128, {}),
    "qwen1.5-moe-a2.7b": (2.689 - 0.311, 2 * 24 * 16 * 128, {}),
    "llama-4-scout": (17.17 - 1.035, 2 * 48 * 8 * 128, {8192: 36, 0: 12}),
    "llama-4-maverick": (17.18 - 1.035, 2 * 48 * 8 * 128, {8192: 36, 0: 12}),
}
"""Billions of parameters that a token meets, without a table that it only looks up in; numbers of KV a token; layers
by the tokens that they read at most (0: all), where pages belong to groups."""


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_each_family(name: str) -> None:
    active, numbers, layers = PLANS[name]
    found = plan(name, tensor_parallel_size=8 if name.startswith("llama-4") else 1)
    assert found.parameters == PARAMETERS[name]
    assert found.active_parameters / 1e9 == pytest.approx(active, rel=1e-3)
    assert found.active_bytes_total == 2 * found.active_parameters
    assert found.kv_bytes_per_token_total == 2 * numbers
    assert {group.reads: group.layers for group in found.kv_groups} == layers


def attention(D: int, N: int, K: int, H: int) -> int:
    """Numbers of a layer's q, k, v and o."""
    return 2 * D * H * (N + K)


LATENT = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
"""Of DeepSeek-V3: q_a, q_b, kv_a, kv_b, o."""
ACTIVE = {
    "mixtral-8x7b": 32 * (attention(4096, 32, 8, 128) + 8 * 4096 + 2 * 3 * 4096 * 14336)
    + 32000 * 4096,
    "olmoe-1b-7b": 16 * (attention(2048, 16, 16, 128) + 64 * 2048 + 8 * 3 * 2048 * 1024)
    + 50304 * 2048,
    "granite-3.0-1b-a400m": 24 * (attention(1024, 16, 8, 64) + 32 * 1024 + 8 * 3 * 1024 * 512)
    + 49155 * 1024,
    "gpt-oss-20b": 24 * (attention(2880, 64, 8, 64) + 32 * 2880 + 4 * 3 * 2880 * 2880)
    + 201088 * 2880,
    "deepseek-v3": 61 * LATENT
    + 3 * 3 * 7168 * 18432
    + 58 * (256 * 7168 + (8 + 1) * 3 * 7168 * 2048)
    + 129280 * 7168,
}
"""Layers of attention, router and chosen experts (of DeepSeek a shared one, and three dense layers), and the head."""
PUBLISHED = {
    "mixtral-8x7b": 12.9,
    "olmoe-1b-7b": 1.3,
    "granite-3.0-1b-a400m": 0.4,
    "gpt-oss-20b": 3.6,
    "deepseek-v3": 37,
}
"""Billions, as publishers round them; some count the table of embeddings, too."""


@pytest.mark.parametrize("name", ACTIVE)
def test_what_a_token_reads_of_mixtures(name: str) -> None:
    found = plan(name, tensor_parallel_size=16 if name == "deepseek-v3" else 1)
    assert found.parameters == PARAMETERS[name]
    assert found.active_parameters == ACTIVE[name]
    assert found.active_bytes_total == 2 * ACTIVE[name]
    assert ACTIVE[name] / 1e9 == pytest.approx(PUBLISHED[name], rel=0.11)


def test_a_token_reads_the_experts_that_it_chooses() -> None:
    """8 of 128 experts of Qwen3-30B-A3B: 3.04 B of 30.5 B parameters, 6.1 GB. 64 tokens that choose at random read
    126 of them."""
    found = plan("qwen3-30b-a3b")
    one_expert = 48 * 3 * 2048 * 768
    attention, router = 48 * 2 * 2048 * 128 * 36, 48 * 128 * 2048
    assert found.active_parameters == 8 * one_expert + attention + router + 2048 * 151936
    assert found.active_bytes_total == pytest.approx(6.1e9, rel=0.01)
    assert found.parameters - found.active_parameters > 27e9
    at_64 = next(p for p in found.programs if (p.decode_rows, p.prefill_tokens) == (64, 0))
    met = 128 * (1 - (1 - 8 / 128) ** 64)
    more = (met - 8) * one_expert * 2
    assert at_64.weight_bytes == pytest.approx(found.active_bytes_total + more, rel=1e-6)
    dense = plan()
    assert dense.active_parameters == dense.parameters - 128_256 * 4096 - 65 * 4096


def test_a_latent_is_counted_once_a_token_and_whole_on_every_device() -> None:
    """576 numbers a layer of DeepSeek-V2-Lite; 2.45 B of its 15.7 B parameters are met by a token."""
    one, eight = plan("deepseek-v2-lite"), plan("deepseek-v2-lite", tensor_parallel_size=8)
    assert one.kv_bytes_per_token == eight.kv_bytes_per_token == 27 * 576 * 2
    assert one.active_parameters == pytest.approx(2.45e9, rel=0.005)


def test_memory_of_8b_on_an_h200() -> None:
    """142,603,651,645 bytes are taken; 85 % of them less 16,060,522,496 of weights, 64 vocab rows
    of 128,256 * 8 bytes and 256 slots of a few hold 12,527 pages of 64 tokens, rounded down to 97 * 128."""
    found = plan()
    assert found.weight_bytes_total == 16_060_522_496
    assert found.kv_bytes_per_token == 128 * 1024
    assert found.device_bytes == 142_603_651_645
    assert found.memory.page_bytes == 64 * 131_072
    assert found.memory.n_pages == 12_416
    few = 3 + (MAX_BAD_WORD_TOKENS - 1) + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
    few += MAX_LOGPROB_TOKEN_IDS
    assert found.memory.vocab_row_bytes == 64 * 128_256 * 8 + 256 * 4
    assert found.memory.slot_bytes == 64 * 128_256 * 8 + 256 * 4 * few
    by_length = {r.length: (r.pages, r.sequences, r.admitted) for r in found.residents}
    assert by_length == {512: (8, 1551, 256), 2048: (32, 387, 256), 8192: (128, 96, 96)}


def test_what_eight_devices_hold() -> None:
    found = plan(tensor_parallel_size=8, lengths="2k")
    norms = 65 * 4096 * 2  # every device keeps them whole
    assert found.memory.weight_bytes == (16_060_522_496 - norms) // 8 + norms
    assert found.kv_bytes_per_token == 16 * 1024
    assert found.kv_bytes_per_token_total == 128 * 1024
    assert plan(tensor_parallel_size=16, lengths="2k").kv_bytes_per_token == 16 * 1024


def test_rates_of_8b_on_an_h200() -> None:
    """Batch 32 at 2048 tokens: 15.0095 GB of weights and 32 * 2049 * 128 KiB of KV at 4.3 TB/s."""
    rates = {(r.batch, r.context): r for r in plan().rates}
    weights = 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    assert weights == pytest.approx(15.0095e9, rel=1e-4)
    limit = (weights + 32 * 2049 * 131_072) / 4.3e12
    assert rates[32, 2048].limit_ms == pytest.approx(limit * 1e3, rel=1e-6)
    assert rates[32, 2048].expected_ms == pytest.approx((limit / 0.7 + 3e-4) * 1e3, rel=1e-6)
    assert rates[1, 512].limit_tok_s == pytest.approx(285, abs=0.5)
    assert rates[64, 8192].fits
    assert not rates[128, 8192].fits


def test_collectives_of_8b_on_eight_devices() -> None:
    """Two sums a layer and one for the embedding, each 2 * 7/8 of its bytes; the logits' gather 7/8
    of its."""
    found = plan(tensor_parallel_size=8)
    assert found.collectives == sizing.Collectives(
        all_reduces=65,
        all_gathers=1,
        bytes_per_token=int((2 * 65 * 4 * 4096 + 4 * 128_256) * 7 / 8),
    )
    program = next(p for p in found.programs if p.name == "step_D32_P0_F0_J1")
    sent = 32 * found.collectives.bytes_per_token / 450e9
    assert program.collectives_ms == pytest.approx((66 * 8e-6 + sent) * 1e3, rel=1e-4)
    assert plan().collectives == sizing.Collectives(all_reduces=0, all_gathers=0, bytes_per_token=0)


def test_a_full_prefill_is_bound_by_flops() -> None:
    found = plan(max_num_batched_tokens=4096, max_num_seqs=8, lengths="2k")
    programs = {p.name: p for p in found.programs}
    mixed = programs["step_D8_P4096_F8_J1"]
    body = 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096
    flops = 2 * body * 4104 + 2 * 16 * 128_256 * 4096 + 4 * 32 * 4096 * 4104 * 2048
    assert mixed.flops == pytest.approx(flops)
    assert mixed.bound == "compute"
    assert mixed.limit_ms == pytest.approx(flops / 780e12 * 1e3)
    assert programs["step_D8_P0_F0_J1"].bound == "memory"
    scored = programs["step_D8_P4096_F8_J1_score"]
    assert scored.flops - mixed.flops == pytest.approx(2 * (4096 - 8) * 128_256 * 4096)


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "load_format": "dummy",
    "compile_cache": "",
    "prompt_logprobs": False,
    "structured_outputs": False,
    "page_size": 8,
}


def started(config: EngineConfig, tp: int) -> ModelRunner:
    """The runner of that config with one program instead of all."""
    model, mesh, rules = find(config.model.model), make_mesh(tp), ShardRules()
    specs = model.family.specs(model.arch, tp)
    params = draw_all(specs, 0, mesh, rules, model.dtype)
    one = Ladder(buckets=(Bucket(D=2, P=0, F=0),))
    return ModelRunner(model.family, model.arch, params, mesh, config, rules=rules, ladder=one)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {}),
        ("h200", {"memory_utilization": 0.5}),
        ("h200", {"tensor_parallel_size": 4, "page_size": 32, "kv_cache_dtype": "bfloat16"}),
        ("h200", {"n_pages": 77}),
        ("h200", {"kv_cache_dtype": "fp8_e4m3"}),
    ],
)
def test_the_engine_allocates_what_the_plan_says(
    device: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = EngineConfig.of(model=str(tmp_path), **SMALL | options)
    if device != "cpu":
        total = 4 << 20
        chip = dataclasses.replace(CHIPS[device], memory=(total + 0.5) / DEVICE_SHARE)
        monkeypatch.setitem(sizing.CHIPS, device, chip)
        taken = DeviceMemory(total=total, taken=0, is_host=False)
        monkeypatch.setattr(DeviceMemory, "of", lambda _: taken)
    found, laid = sizing.plan(str(tmp_path), device, (100,), config)
    runner = started(config, laid.tp)
    if device == "cpu":
        assert found.memory.n_pages == runner.memory.n_pages
    else:
        assert found.memory == runner.memory
    held = sum(x.nbytes for x in jax.tree.leaves(runner.state.kv))
    assert held == laid.tp * found.memory.kv_bytes
    assert found.memory.kv_bytes == found.memory.n_pages * found.memory.page_bytes
    names = [step_name(b) for b in runner.sizes.ladder.buckets]
    assert [p.name for p in found.programs] == names


@pytest.mark.parametrize(
    ("generation", "options", "n_rows"),
    [
        ({}, {}, 64),
        ({"repetition_penalty": 1.05}, {}, 80),
        ({"repetition_penalty": 1.0}, {}, 64),
        ({"repetition_penalty": -3}, {}, 64),
        ({"repetition_penalty": 1.05}, {"max_penalized_seqs": 9}, 9),
        ({"repetition_penalty": 1.05}, {"max_penalized_seqs": 0}, 0),
        ({}, {"max_penalized_seqs": 99}, 80),
        ({}, {"max_num_seqs": 3}, 3),
    ],
)
def test_sequences_with_penalties_at_once(
    generation: dict, options: dict, n_rows: int, tmp_path: Path
) -> None:
    """A model whose own defaults have a penalty can have it in every sequence; the plan and the runner
    that ``jserve serve`` builds say the same number."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = EngineConfig.of(model=str(tmp_path), **SMALL | {"max_num_seqs": 80} | options)
    for named in (tmp_path, tmp_path / "config.json"):
        found, laid = sizing.plan(str(named), "h200", (100,), config)
        assert found.max_penalized_seqs == laid.sizes.limits.n_vocab_rows == n_rows
    made: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_runner, "ModelRunner", lambda *_, **given: made.update(given))
        build._runner(config, lambda *_: None, None, None)
    assert config.scheduler.n_vocab_rows(penalises=made["penalises"]) == n_rows


@pytest.mark.parametrize("backend", ["xla", "ref", "hopper"])
def test_8_bits_hold_twice_the_tokens_of_16(backend: str) -> None:
    if backend == "hopper" and jax.__version_info__ < (0, 11):
        pytest.skip("needs jax 0.11")
    options = {"kv_memory_gb": 20.0, "attention_backend": backend, "lengths": "2k"}
    sixteen, eight = (plan(kv_cache_dtype=name, **options) for name in ("bf16", "fp8"))
    assert (sixteen.kv_dtype, eight.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert 2 * eight.memory.page_bytes == sixteen.memory.page_bytes
    assert eight.memory.n_pages == 2 * sixteen.memory.n_pages == 2 * (20 << 30) // (64 * 131072)
    assert eight.memory.kv_bytes == sixteen.memory.kv_bytes
    assert eight.residents[0].sequences in (
        2 * sixteen.residents[0].sequences,
        2 * sixteen.residents[0].sequences + 1,
    )
    last = [p.rates[-1] for p in (sixteen, eight)]
    assert last[1].limit_tok_s > 1.5 * last[0].limit_tok_s


def test_heads_that_the_kernels_do_not_serve_in_8_bits_are_refused(tmp_path: Path) -> None:
    if jax.__version_info__ < (0, 11):
        pytest.skip("needs jax 0.11")
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.2-1b"] | {"head_dim": 256}))
    asked = {"name": str(tmp_path), "attention_backend": "hopper"}
    plan(**asked)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8_e4m3.*not 256") as caught:
        plan(kv_cache_dtype="fp8_e4m3", **asked)
    assert caught.value.field == "kv_cache_dtype"
    plan(kv_cache_dtype="fp8_e4m3", name=str(tmp_path), attention_backend="xla")


def test_a_model_that_does_not_fit_says_how_many_devices_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"141\.11 GB of weights each.*takes 2 devices") as caught:
        plan("llama-3.1-70b")
    assert caught.value.field == "memory_utilization"
    assert plan("llama-3.1-70b", tensor_parallel_size=2).memory.n_pages > 4097
    with pytest.raises(ConfigError, match=r"takes 4 devices \(--tp 4\)"):
        plan("llama-3.1-70b", "h100")


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"name": "nowhere"}, "model", "known shapes: llama-3.2-1b"),
        ({"device": "v100"}, "device", "one of h200, h100"),
        ({"lengths": "1,x"}, "lengths", "'x' is no number"),
        ({"lengths": "0"}, "lengths", "'0' is no number"),
        ({"lengths": "256k"}, "lengths", "262144 tokens exceed the context of 131072"),
        ({"name": "qwen2.5-7b", "tensor_parallel_size": 3}, "num_attention_heads", "28"),
        ({"max_model_len": 200_000}, "max_model_len", "exceeds the model's 131072"),
        ({"n_pages": 5}, "n_pages", "5 KV pages"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments: dict, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        plan(**arguments)
    assert caught.value.field == field


def test_a_model_by_its_file_or_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["qwen3-8b"]))
    for name in (path, tmp_path):
        assert find(str(name)).n_params == PARAMETERS["qwen3-8b"]
    path.write_text(json.dumps(SHAPES["qwen3-8b"] | {"num_experts": 8}))
    with pytest.raises(ConfigError, match="num_experts"):
        find(str(path))
    path.write_text("[1")
    with pytest.raises(ConfigError, match="not JSON"):
        find(str(tmp_path))


def test_lengths() -> None:
    assert sizing.lengths_of("8k, 512,2K,512") == (512, 2048, 8192)
    assert [r.length for r in plan("qwen3-0.6b", max_model_len=1000).residents] == [512]
    assert [r.length for r in plan("qwen3-0.6b", max_model_len=256).residents] == [256]


def test_tables_and_json_say_the_same() -> None:
    found = plan(tensor_parallel_size=2, lengths="512,64k")
    console = Console(width=show.WIDTH, record=True, file=io.StringIO())
    show.as_text(found, console)
    text = console.export_text()
    data = json.loads(show.as_json(found))
    assert data["memory"]["n_pages"] == found.memory.n_pages
    assert f"{found.memory.n_pages} pages of 64" in text
    assert "no room" in text
    assert "65 all-reduces and 1 all-gather" in text
    assert len(data["programs"]) == len(found.programs)
    assert all(p.name in text for p in found.programs)


def test_the_command() -> None:
    """Options are those of ``serve``; a mistake is one line and exit code 2."""
    run = CliRunner().invoke
    done = run(app, ["plan", "Llama-3.1-8B", "--tp", "2", "--max-num-seqs", "64", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["devices"], data["max_num_seqs"]) == (2, 64)
    assert data["memory"]["weight_bytes"] == 8_030_261_248 + 65 * 4096
    shown = run(app, ["plan", "llama-3.1-8b", "--lengths", "4k"])
    assert "8.03 B parameters, bfloat16, 16.06 GB in all" in shown.stdout
    assert "128 KiB a token" in shown.stdout
    wrong = run(app, ["plan", "llama-3.1-8b", "--device", "abacus"])
    assert wrong.exit_code == 2
    assert wrong.stderr == ("error: device must be one of h200, h100, b200, cpu, not 'abacus'\n")
    assert not wrong.stdout


def test_the_shipped_model_on_this_machine() -> None:
    done = CliRunner().invoke(app, ["plan", "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == "jserve-mini"


def test_experts_over_devices_are_counted_on_each() -> None:
    """A fourth of the experts and of all else on each; spare slots are weights too."""

    def found(**options: Any) -> sizing.Plan:
        config = EngineConfig.of(page_size=64, max_model_len=4096, **options)
        return sizing.plan("qwen3-30b-a3b", "h200", (1024,), config)[0]

    split = found(tensor_parallel_size=4)
    whole = found(expert_parallel_size=4)
    mixed = found(expert_parallel_size=2, tensor_parallel_size=2)
    spare = found(expert_parallel_size=4, num_redundant_experts=16)
    assert {p.devices for p in (split, whole, mixed, spare)} == {4}
    assert whole.memory.weight_bytes == split.memory.weight_bytes == mixed.memory.weight_bytes
    expert = 3 * 2048 * 768 * 2
    assert spare.memory.weight_bytes - whole.memory.weight_bytes == 48 * 4 * expert
    slow, even = whole.rates[0].limit_ms, split.rates[0].limit_ms
    assert slow > 1.05 * even, "the fullest device has more than its share at batch 1"
    at_256 = [rate for plan in (whole, split) for rate in plan.rates if rate.batch == 256]
    assert at_256[0].limit_ms == pytest.approx(at_256[1].limit_ms, rel=0.02)


@pytest.mark.parametrize(
    ("model", "options", "field"),
    [
        ("qwen3-30b-a3b", {"expert_parallel_size": 3}, "num_attention_heads"),
        ("mixtral-8x7b", {"expert_parallel_size": 16}, "expert_parallel_size"),
        ("llama-3.2-1b", {"expert_parallel_size": 2}, "expert_parallel_size"),
        ("llama-3.2-1b", {"expert_load_metrics": True}, "expert_load_metrics"),
        ("qwen3-30b-a3b", {"enable_eplb": True}, "enable_eplb"),
        ("qwen3-30b-a3b", {"num_redundant_experts": 8}, "num_redundant_experts"),
    ],
)
def test_experts_that_devices_cannot_share_are_refused(
    model: str, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sizing.plan(model, "h200", (100,), EngineConfig.of(max_model_len=1024, **options))
    assert caught.value.field == field
