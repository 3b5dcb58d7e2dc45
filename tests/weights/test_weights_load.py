"""Loading onto 1 to 8 devices against a plain numpy assembly, and the memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import ParamSpec, Part, is_spec
from jserve.model.shard import ShardRules, padded, partitions
from jserve.weights.layout import check, pieces, relayout, split, whole
from jserve.weights.loader import load
from jserve.weights.place import bad_values, bad_values_on_device, tp_size
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.weights.weights_kit import BF16, LLAMA, Model, same

RULES = ShardRules()
ROOT = Path(__file__).parents[2]
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "one kv head": LLAMA | {"num_key_value_heads": 1},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "phi3": LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "olmo2": LLAMA | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "latent": LLAMA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 12,
        "q_lora_rank": 10,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
    },
    "alternating": GPT_OSS,
    "halves": LLAMA
    | {
        "architectures": ["Llama4ForCausalLM"],
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "moe_layers": [1],
        "intermediate_size_mlp": 72,
    },
    "all heads": LLAMA | {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
}


def loaded(model: Model, tp: int, dtype: Any = BF16, **options: Any) -> Any:
    source = resolve(str(model.path))
    return load(model.family, model.arch, source, make_mesh(tp), RULES, dtype, **options)


def expected(model: Model, tp: int, dtype: Any = BF16) -> Any:
    return assemble_all(model.family.specs(model.arch, tp), model.tensors.__getitem__, dtype)


def assert_equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert same(x, y), jax.tree_util.keystr(path)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_equals_a_plain_assembly(tmp_path: Path, name: str, tp: int) -> None:
    model = Model(tmp_path / "m", CONFIGS[name]).single()
    assert_equal(loaded(model, tp), expected(model, tp))


def numbers_of(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16[E, D, N] of mxfp4 blocks [E, N, D / 32, 16] with their scales, from its table."""
    numbers = [s * x for s in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
    values = np.array(numbers)[halves] * 2.0 ** (scales.astype(int) - 127)[..., None]
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2).astype(BF16)


def numbers_of_transformers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same by transformers."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    found = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    return found.float().numpy().astype(BF16)


@pytest.mark.parametrize(
    ("tp", "numbers"), [(1, numbers_of), (2, numbers_of), (1, numbers_of_transformers)]
)
def test_mxfp4_is_decoded(tmp_path: Path, tp: int, numbers: Any) -> None:
    """Blocks and scales give what their numbers in bfloat16 give."""
    stated = {"quantization_config": {"quant_method": "mxfp4"}}
    model = Model(tmp_path / "m", GPT_OSS | stated)
    packed, rng = dict(model.tensors), np.random.default_rng(4)
    for name in [n for n in packed if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, D, N = packed.pop(name).shape
        blocks = rng.integers(0, 256, (E, N, D // 32, 16), np.uint8)
        scales = rng.integers(120, 131, (E, N, D // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.tensors[name] = numbers(blocks, scales)
        assert model.tensors[name].shape == (E, D, N)
    want, model.tensors = expected(model, tp), packed
    assert_equal(loaded(model.single(), tp), want)
    del packed["model.layers.0.mlp.experts.down_proj_scales"]
    with pytest.raises(WeightsError, match="down_proj_scales"):
        loaded(model.single(), tp)


def test_weights_that_predict_further_ahead_are_ignored_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek-V3's layer after the last one."""
    model = Model(tmp_path / "m", CONFIGS["latent"])
    want, one = expected(model, 1), np.zeros((2, 2), BF16)
    names = ("eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight")
    model.tensors |= {f"model.layers.2.{name}": one for name in names}
    assert_equal(loaded(model.single(), 1), want)
    said = [r.message for r in caplog.records if "unused" in r.message]
    assert len(said) == 1
    assert "model.layers.2.eh_proj.weight" in said[0]


def test_every_shard_holds_its_slice_only(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", LLAMA).single()
    params = loaded(model, 8)
    specs = model.family.specs(model.arch, 8)
    for array, partition in zip(
        jax.tree.leaves(params), jax.tree.leaves(partitions(specs, RULES)), strict=True
    ):
        assert array.sharding.spec == partition
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            assert same(shard.data, np.asarray(array)[shard.index])
    assert params["embed"].addressable_shards[0].data.shape == (8, 32)


@pytest.mark.parametrize(("tp", "rows"), [(1, 61), (2, 62), (4, 64), (8, 64)])
def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros(
    tmp_path: Path, tp: int, rows: int
) -> None:
    model = Model(tmp_path / "m", LLAMA | {"vocab_size": 61}).single()
    params = loaded(model, tp)
    for name, tensor in (("embed", "model.embed_tokens.weight"), ("unembed", "lm_head.weight")):
        got = np.asarray(params[name])
        assert same(got[:61], model.tensors[tensor])
        assert got.shape == (rows, 32)
        assert not got[61:].any()
        assert {s.data.shape for s in params[name].addressable_shards} == {(rows // tp, 32)}
    want = expected(Model(tmp_path / "n", LLAMA | {"vocab_size": 61}), tp)
    assert_equal(params["layers"], want["layers"])


@pytest.mark.parametrize("n", [1, 3])
def test_sharded_files_load_the_same(tmp_path: Path, n: int) -> None:
    model = Model(tmp_path / "m", LLAMA).sharded(n)
    assert_equal(loaded(model, 2), expected(model, 2))
    (model.path / "model.safetensors.index.json").unlink()
    assert_equal(loaded(model, 2), expected(model, 2))


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16, np.float64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_casts_like_numpy(tmp_path: Path, stored: Any, dtype: Any) -> None:
    model = Model(tmp_path / "m", LLAMA | {"num_hidden_layers": 1}, np.dtype(stored)).single()
    want = {n: x.astype(dtype) for n, x in model.tensors.items()}
    specs = model.family.specs(model.arch, 2)
    assert_equal(loaded(model, 2, dtype), assemble_all(specs, want.__getitem__, dtype))


@pytest.mark.parametrize("change", ["strip", "add"])
def test_prefix_of_names_may_differ(tmp_path: Path, change: str) -> None:
    model = Model(tmp_path / "m", LLAMA)
    want = expected(model, 2)
    strip = change == "strip"
    model.tensors = {
        (n.removeprefix("model.") if strip else f"model.{n}" if n.startswith("lm_head") else n): x
        for n, x in model.tensors.items()
    }
    model.single()
    assert_equal(loaded(model, 2), want)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", LLAMA).single()
    seen: list[tuple[str, int, int]] = []
    params = loaded(model, 2, progress=lambda *step: seen.append(step))
    sizes = [x.nbytes for x in jax.tree.leaves(params)]
    assert [done for _, done, _ in seen] == list(np.cumsum(sizes))
    assert {total for _, _, total in seen} == {sum(sizes)}
    assert "layers.1.qkv" in [name for name, _, _ in seen]


def test_mesh_must_fit_the_rules(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", LLAMA).single()
    source = resolve(str(model.path))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with pytest.raises(ConfigError, match="no axis 'tp'") as caught:
        load(model.family, model.arch, source, mesh, RULES, BF16)
    assert caught.value.field == "sharding.rules.kv_heads"
    rules = ShardRules(extra={"embed": "x"})
    mesh = jax.make_mesh((1, 3), ("tp", "x"), devices=jax.devices()[:3])
    with pytest.raises(
        ConfigError, match="does not split over the 3 devices of mesh axis 'x'"
    ) as e:
        load(model.family, model.arch, source, mesh, rules, BF16)
    assert e.value.field == "sharding.rules.embed"
    with pytest.raises(ConfigError, match="scan_nan"):
        load(model.family, model.arch, source, make_mesh(1), RULES, BF16, scan_nan="maybe")


def test_tp_size_follows_the_rules() -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))
    assert tp_size(mesh, RULES) == 4
    assert tp_size(mesh, ShardRules(kv_heads=None)) == 1
    assert tp_size(mesh, ShardRules(kv_heads="dp")) == 2


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("tp", [1, 4])
def test_full_scan_names_the_tensor(tmp_path: Path, bad: float, tp: int) -> None:
    model = Model(tmp_path / "m", LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    model.tensors[name][63, 31] = bad
    model.single()
    with pytest.raises(WeightsError, match="NaN" if np.isnan(bad) else "infinite") as caught:
        loaded(model, tp, scan_nan="full")
    assert caught.value.field == f"{model.path / 'model.safetensors'}:{name}"
    loaded(model, tp, scan_nan="off")


@pytest.mark.parametrize("scan", ["sample", "full"])
@pytest.mark.parametrize("shard", range(4))
@pytest.mark.parametrize(
    ("name", "rows"), [("lm_head.weight", True), ("model.layers.0.mlp.down_proj.weight", False)]
)
def test_the_scan_looks_at_every_shard(
    tmp_path: Path, name: str, rows: bool, shard: int, scan: str
) -> None:
    """64 rows of lm_head, or 64 columns of down, over four devices."""
    model = Model(tmp_path / "m", LLAMA)
    at = 16 * shard + 3
    model.tensors[name][(at, 0) if rows else (0, at)] = np.nan
    model.single()
    with pytest.raises(WeightsError, match="NaN") as caught:
        loaded(model, 4, scan_nan=scan)
    assert caught.value.field == f"{model.path / 'model.safetensors'}:{name}"


def test_overflow_of_the_cast_is_found(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", LLAMA)
    model.tensors["model.norm.weight"][3] = 1e30
    model.single()
    with np.errstate(over="ignore"), pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        loaded(model, 1, jnp.float16)


def test_sample_scan_finds_a_broken_tensor_and_reads_little() -> None:
    block = np.zeros((3000, 1000), np.float32)
    block[1700, 13] = np.nan
    assert bad_values(block, "full") == "has NaN values"
    assert bad_values(block, "sample") is None
    assert bad_values(block, "off") is None
    block[5:40] = np.nan
    assert bad_values(block, "sample") == "has NaN values"
    assert bad_values(block[:, ::2], "full") == "has NaN values"
    assert bad_values(block[50:1700], "full") is None
    assert bad_values(np.array([1, np.inf], BF16), "sample") == "has infinite values"
    assert bad_values_on_device(jnp.asarray(block), "sample") == "has NaN values"
    assert bad_values_on_device(jnp.asarray(block[50:1700]), "full") is None


# ---- index arithmetic --------------------------------------------------------------------------


def fused(repeat: int) -> ParamSpec:
    """Like qkv: [K * repeat, G + 2, 3], G = 2 / repeat."""
    K, G = 2 * repeat, 2 // repeat
    q = Part(name="q", shape=(12,), view=(K, G, 3))
    k, v = (Part(name=n, shape=(6,), view=(2, 1, 3), repeat=repeat) for n in "kv")
    return ParamSpec(shape=(K, G + 2, 3), axes=("kv_heads", None, None), parts=(q, k, v), concat=1)


@pytest.mark.parametrize("repeat", [1, 2])
def test_any_box_of_a_parameter_is_cut_right(repeat: int) -> None:
    spec, rng = fused(repeat), np.random.default_rng(1)
    check(spec, "fused")
    tensors = {p.name: rng.standard_normal(p.shape) for p in spec.parts}
    views = [np.repeat(tensors[p.name].reshape(p.view), p.repeat, 0) for p in spec.parts]
    full = np.concatenate(views, 1)
    for _ in range(200):
        ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in spec.shape]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        out = np.full(full[index].shape, np.nan)
        cut = np.full_like(out, np.nan)
        for piece in pieces(spec, index):
            piece.copy(tensors[piece.part.name], out[piece.out])
            cut[piece.out] = piece.cut(tensors[piece.part.name])
            assert piece.shape == out[piece.out].shape
        assert same(out, full[index])
        assert same(cut, full[index])


def test_padding_is_added_and_dropped() -> None:
    part = Part(name="head", shape=(5, 3), view=(5, 3))
    plain = ParamSpec(shape=(5, 3), axes=("vocab", None), parts=(part,))
    wide = padded({"x": plain}, RULES, {"tp": 4})["x"]
    check(wide, "wide")
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    for array, concatenate in ((x, np.concatenate), (jnp.asarray(x), jnp.concatenate)):
        got = relayout(array, plain, wide, concatenate)
        assert same(got, np.pad(x, ((0, 3), (0, 0))))
        assert same(relayout(got, wide, plain, concatenate), x)
    assert not list(pieces(wide, (slice(6, 8), slice(0, 3))))


def test_layouts_convert_into_each_other() -> None:
    one, two = fused(1), fused(2)
    tensors = {p.name: np.arange(float(p.shape[0])) + i for i, p in enumerate(one.parts)}
    a, b = (
        np.concatenate([pc.cut(tensors[pc.part.name]) for pc in pieces(s, whole(s))], 1)
        for s in (one, two)
    )
    assert same(relayout(a, one, two), b)
    assert same(relayout(b, two, one), a)
    assert same(relayout(jnp.asarray(a), one, two, jnp.concatenate), jnp.asarray(b))
    assert all(same(split(two, b)[n], x) for n, x in tensors.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_specs_of_the_families_are_consistent(name: str, tmp_path: Path) -> None:
    model = Model(tmp_path, CONFIGS[name])
    for tp in (1, 2, 4, 8):
        for spec in jax.tree.leaves(model.family.specs(model.arch, tp), is_leaf=is_spec):
            check(spec, name)


# ---- memory ------------------------------------------------------------------------------------

MEASURE = """
import gc, re, sys, threading, time
import jax
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.weights.loader import load
from jserve.weights.source import resolve

def rss():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def measure(tp, dtype):
    args = (family, arch, source, make_mesh(tp), ShardRules(), jax.numpy.dtype(dtype))
    jax.block_until_ready(load(*args))  # first use of these devices allocates for good
    gc.collect()
    before, peak, stop = rss(), [0], threading.Event()
    def watch():
        while not stop.is_set():
            peak[0] = max(peak[0], rss())
            time.sleep(0.0005)
    thread = threading.Thread(target=watch)
    thread.start()
    params = jax.block_until_ready(load(*args))
    stop.set()
    thread.join()
    shards = [s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards]
    print(tp, dtype, peak[0] - before - sum(shards), max(shards))

source = resolve(sys.argv[1])
family = family_for(source.config)
arch = family.arch(source.config)
for case in sys.argv[2:]:
    tp, dtype = case.split(":")
    measure(int(tp), dtype)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_one_shard(tmp_path: Path) -> None:
    """Anonymous memory above the parameters themselves stays below 1.2 of the largest shard."""
    big = LLAMA | {"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 32768}
    model = Model(tmp_path / "m", big).single()
    cases = ["1:bfloat16", "4:bfloat16", "1:float32"]
    run = [sys.executable, "-c", MEASURE, str(model.path), *cases]
    # Freed blocks go back to the kernel at once, so that what is held is what is counted.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [f"{tp}:{dtype}" for tp, dtype, *_ in lines] == cases
    for *_, extra, shard in lines:
        assert int(extra) < 1.2 * int(shard), done.stdout


KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}


def with_scales(path: Path, shape: tuple[int, ...] = (1,), **changes: float) -> Model:
    """A model with scales of its own in every layer, in the checkpoint's dtype; ``changes`` of the first
    layer."""
    model = Model(path, LLAMA | {"quantization_config": KV_ONLY})
    for i in range(2):
        for j, name in enumerate(("k_scale", "v_scale")):
            number = changes.get(name, 0.25 + i + j / 2) if i == 0 else 0.25 + i + j / 2
            at = f"model.layers.{i}.self_attn.{name}"
            model.tensors[at] = np.full(shape, number, np.float32).astype(BF16)
    return model.single()


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scales_of_8_bit_kv(tp: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    """One number for all kv heads, kept in float32, repeated where heads are."""
    params = loaded(with_scales(tmp_path / "m", shape), tp)
    for i in range(2):
        scale_K2 = params["layers"][i]["kv_scale"]
        assert scale_K2.dtype == jnp.float32
        want = np.tile(np.float32([0.25 + i, 0.75 + i]), (max(2, tp), 1))
        np.testing.assert_array_equal(scale_K2, want)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scales_of_kv_heads(tp: int, tmp_path: Path) -> None:
    """A number for each kv head, repeated as heads are: 0 0 1 1."""
    scheme = KV_ONLY["kv_cache_scheme"] | {"strategy": "attn_head"}
    model = Model(tmp_path, LLAMA | {"quantization_config": KV_ONLY | {"kv_cache_scheme": scheme}})
    for i in range(2):
        for j, name in enumerate(("k_scale", "v_scale")):
            numbers = np.float32([0.25, 0.375]) + i + j / 2
            model.tensors[f"model.layers.{i}.self_attn.{name}"] = numbers.reshape(2, 1, 1)
    params = loaded(model.single(), tp)
    for i in range(2):
        want = np.float32([[0.25, 0.75], [0.375, 0.875]]) + i
        want = want.repeat(max(1, tp // 2), axis=0)
        np.testing.assert_array_equal(params["layers"][i]["kv_scale"], want)


@pytest.mark.parametrize("both", [False, True], ids=["output_scale", "kv_scale"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scales_of_kv_as_autofp8_writes_them(tp: int, both: bool, tmp_path: Path) -> None:
    """Of the outputs of ``k_proj`` and ``v_proj``, or one for both."""
    model = with_scales(tmp_path / "m")
    for i in range(2):
        at = f"model.layers.{i}.self_attn"
        k, v = (model.tensors.pop(f"{at}.{name}") for name in ("k_scale", "v_scale"))
        own = {f"{at}.k_proj.output_scale": k, f"{at}.v_proj.output_scale": v}
        model.tensors |= {f"{at}.kv_scale": v} if both else own
    params = loaded(model.single(), tp)
    for i in range(2):
        want = np.float32([0.75 if both else 0.25, 0.75]) + i
        np.testing.assert_array_equal(
            params["layers"][i]["kv_scale"], np.tile(want, (max(2, tp), 1))
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_scale": 0.0}, "k_scale must be positive"),
        ({"v_scale": -1.0}, "v_scale must be positive"),
        ({"v_scale": np.nan}, "v_scale has NaN"),
        ({"k_scale": np.inf}, "k_scale has infinite"),
    ],
)
def test_scales_that_cannot_be_are_refused_by_tensor(
    changes: dict[str, float], words: str, tmp_path: Path
) -> None:
    model = with_scales(tmp_path / "m", **changes)
    with pytest.raises(WeightsError) as caught:
        loaded(model, 2)
    for word in words.split(" ", 1):
        assert word in caught.value.message, caught.value.message
    model.tensors.pop("model.layers.1.self_attn.v_scale")
    model.single()
    with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.v_scale.*missing"):
        loaded(model, 2)
