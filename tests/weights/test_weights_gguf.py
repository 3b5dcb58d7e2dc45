"""GGUF files: the parameters, config and tokenizer that their bytes stand for, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.gguf import header
from jserve.gguf.config import llama3_factors
from jserve.model.families import family_for
from jserve.model.hand import Row
from jserve.model.mesh import make_mesh
from jserve.model.shard import partitions
from jserve.model.view import Bucket
from jserve.weights.convert import convert
from jserve.weights.loader import load
from jserve.weights.quant.gguf_blocks import decoded
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.model.driver import Driver
from tests.text.test_gguf_tokenizer import QWEN2, header_of, trained
from tests.weights import gguf_files as files
from tests.weights.test_weights_quant import RULES, assert_equal, said, wide
from tests.weights.weights_kit import tensors_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.5**17,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, around: bool) -> str:
    stem, _, ending = name.rpartition(".")
    names = NAMES | (AROUND if around else {"post_attention_layernorm": "ffn_norm"})
    if stem in names:
        return f"{names[stem]}.{ending}"
    _, _, layer, *rest = stem.split(".")
    return f"blk.{layer}.{names['.'.join(rest)]}.{ending}"


def paired(x: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys as converters lay them for Llamas: rows i and H/2 + i of a head beside each other."""
    H, made = len(x) // heads, np.empty_like(x)
    for h in range(heads):
        for i in range(H // 2):
            made[h * H + 2 * i] = x[h * H + i]
            made[h * H + 2 * i + 1] = x[h * H + H // 2 + i]
    return made


class Written:
    """A GGUF file of a model; ``kinds``: gguf name -> type of the tensors that are quantised."""

    def __init__(
        self,
        path: Path,
        architecture: str,
        config: dict[str, Any],
        kinds: dict[str, str] | None = None,
        **metadata: Any,
    ) -> None:
        self.path, self.config = path / "tiny.gguf", config
        self.family = family_for(config)
        self.arch = self.family.arch(config)
        self.wide, rng = tensors_of(self.family, self.arch, np.float32), np.random.default_rng(3)
        self.tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        gemma, llama = architecture.startswith("gemma"), architecture == "llama"
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for name, x in self.wide.items():
            to = gguf_name(name, architecture in ("gemma2", "gemma3"))
            part = name.split(".")[-2]
            n = config[heads[part]] if llama and part in heads else 0
            if kind := (kinds or {}).get(to, ""):
                stored, lies = files.matrix(kind, rng, *x.shape)
                order = np.argsort(paired(np.arange(len(x)), n)) if n else slice(None)
                self.wide[name] = lies[order]
            else:
                kind, y = "F32", paired(x, n) if n else x
                stored = files.plain(kind, y + 1 if gemma and name.endswith("norm.weight") else y)
            self.tensors[to] = (kind, x.shape, stored)
        self.metadata = {"general.architecture": architecture}
        for key, of in KEYS.items():
            if config.get(of) is not None:
                self.metadata[f"{architecture}.{key}"] = config[of]
        self.metadata |= metadata
        self.write()

    def write(self, **how: Any) -> Written:
        self.path.write_bytes(files.gguf(self.metadata, self.tensors, **how))
        return self


def loaded(model: Written, tp: int = 1, asked: str = "auto") -> Any:
    source = resolve(str(model.path))
    scheme = scheme_of(source.config, jnp.float32, asked)
    family = quantised(family_for(source.config), scheme)
    how = (source, make_mesh(tp), RULES, jnp.float32)
    return load(family, family.arch(source.config), *how, scheme=scheme)


def expected(model: Written, tp: int = 1) -> Any:
    return assemble_all(model.family.specs(model.arch, tp), model.wide.__getitem__, jnp.float32)


def layer(n: int, *kinds: str) -> dict[str, str]:
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return {f"blk.{n}.{p}.weight": k for p, k in zip(parts, kinds, strict=True)}


MIXED = (
    layer(0, "Q4_K", "Q4_K", "Q4_K", "Q6_K", "Q4_0", "Q4_0", "Q5_K")
    | layer(1, "Q4_K", "Q5_0", "Q6_K", "Q8_0", "Q4_1", "Q5_1", "Q4_1")
    | {"token_embd.weight": "Q6_K", "output.weight": "Q8_0"}
)
SERVED = [
    {
        "qkv": "uint4 g32 shifts",
        "o": "int8 g16",
        "gate_up": "int4 g32",
        "down": "int8 g32 shifts",
    },
    {
        "qkv": "int8 g16 shifts",
        "o": "int8 g32",
        "gate_up": "int8 g32 shifts",
        "down": "uint4 g32 shifts",
    },
]


@pytest.mark.parametrize("kind", files.BLOCKS)
def test_blocks_stand_for_these_numbers(kind: str) -> None:
    stored, want = files.matrix(kind, np.random.default_rng(0), 6, 512)
    rows = np.frombuffer(stored, np.uint8).reshape(6, -1)
    np.testing.assert_array_equal(decoded(kind, rows).widened(), want)


def test_a_file_of_all_types(tmp_path: Path) -> None:
    model = Written(tmp_path, "llama", CONFIG, MIXED)
    one = loaded(model)
    for n, forms in enumerate(SERVED):
        assert {name: said(one["layers"][n][name]) for name in forms} == forms
    assert said(one["unembed"]) == "int8 g32"
    assert isinstance(one["embed"], jax.Array)
    for tp in (1, 4):
        assert_equal(wide(loaded(model, tp)), expected(model, tp))
    assert_equal(loaded(model, 2, "none"), expected(model, 2))


def test_logits_are_those_of_the_widened_matrices(tmp_path: Path) -> None:
    model, bucket = Written(tmp_path, "llama", CONFIG, MIXED), Bucket(D=2, P=24, F=1)
    driver = Driver(model.family, model.arch, model.wide.__getitem__)
    logits, tokens = [], [int(t) for t in np.random.default_rng(0).integers(0, 64, 20)]
    for params in (driver.params, loaded(model)):
        driver.params = params
        if logits:
            scheme = scheme_of(resolve(str(model.path)).config, jnp.float32)
            specs = quantised(model.family, scheme).specs(model.arch, 1)
            driver.param_specs = partitions(specs, RULES)
        logits.append(driver.step(bucket, prefill=[Row([1, 2, 3], 0, tokens)])[2:22])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4 * np.abs(logits[0]).max())


SMALL = CONFIG | {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 1}
WINDOWED = {"sliding_window": 16, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "mistral": ("llama", {"architectures": ["MistralForCausalLM"], "sliding_window": 16}),
    "qwen2": ("qwen2", {"architectures": ["Qwen2ForCausalLM"]}),
    "qwen3": ("qwen3", {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}),
    "gemma": (
        "gemma",
        {
            "architectures": ["GemmaForCausalLM"],
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "gemma2",
        WINDOWED
        | {
            "architectures": ["Gemma2ForCausalLM"],
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3",
        WINDOWED
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 6,
            "rope_theta": 1e6,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_of_a_header(tmp_path: Path, name: str) -> None:
    architecture, more = FAMILIES[name]
    model = Written(tmp_path, architecture, SMALL | more)
    source = resolve(str(model.path))
    assert source.config["torch_dtype"] == "float32"
    assert family_for(source.config).arch(source.config) == model.arch
    got, want = loaded(model), expected(model)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Norms of Gemma lose what adding 1 rounds off.
        np.testing.assert_allclose(x, y, atol=3e-7 if "gemma" in name else 0)


def test_ropes_that_are_scaled(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = SMALL | {"head_dim": 64, "rope_theta": 500000.0}
    model = Written(tmp_path, "llama", config | {"rope_scaling": scaling})
    factors = llama3_factors(scaling, 64, 500000.0)
    assert factors[0] == 1
    assert factors[-1] == 8
    model.tensors["rope_freqs.weight"] = ("F32", (32,), files.plain("F32", factors))
    source = resolve(str(model.write().path))
    assert family_for(source.config).arch(source.config) == model.arch
    loaded(model)
    model.tensors["rope_freqs.weight"] = ("F32", (32,), files.plain("F32", factors * 1.1))
    with pytest.raises(WeightsError, match="other factors"):
        resolve(str(model.write().path))
    del model.tensors["rope_freqs.weight"]
    for kind, more in (("linear", {}), ("yarn", {"original_max_position_embeddings": 64})):
        model.metadata |= {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
        model.metadata |= {"llama.rope.scaling.original_context_length": 64}
        config = resolve(str(model.write().path)).config
        want = model.family.arch(
            SMALL
            | {"head_dim": 64, "rope_theta": 500000.0}
            | {"rope_scaling": {"rope_type": kind, "factor": 4.0, **more}}
        )
        assert model.family.arch(config) == want


@pytest.mark.slow
def test_convert_keeps_the_forms_and_writes_the_config(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", *map(chr, range(97, 123))]
    more = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    more |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.chat_template": "{{ messages }}"}
    more["tokenizer.ggml.tokens"] = [*tokens, "ab"]
    model = Written(tmp_path, "llama", CONFIG, MIXED, **more)
    source = convert(str(model.path), tmp_path / "out", dtype="float32")
    scheme = scheme_of(source.config, jnp.float32)
    family = quantised(model.family, scheme)
    how = (source, make_mesh(2), RULES, jnp.float32)
    assert_equal(wide(load(family, model.arch, *how, scheme=scheme)), expected(model, 2))
    assert (tmp_path / "out/tokenizer.json").is_file()


Edit = Any


def key(name: str, value: Any) -> Edit:
    return lambda model: model.metadata.update({name: value})


def without(name: str) -> Edit:
    return lambda model: (model.metadata.pop(name, None), model.tensors.pop(name, None))


def tensor(name: str, *how: Any) -> Edit:
    return lambda model: model.tensors.update({name: how})


BIASES = {f"blk.0.attn_{n}.bias": ("F32", (32,), bytes(128)) for n in "q"}
CONFIGS: dict[str, tuple[Edit, str]] = {
    "architecture": (key("general.architecture", "mamba"), "general.architecture"),
    "no architecture": (without("general.architecture"), "general.architecture"),
    "experts": (key("llama.expert_count", 8), "llama.expert_count"),
    "parts": (key("split.count", 2), "split.count"),
    "missing": (without("llama.block_count"), "llama.block_count"),
    "no number": (key("llama.block_count", "two"), "llama.block_count"),
    "heads by layer": (
        key("llama.attention.head_count_kv", [1, 2]),
        "llama.attention.head_count_kv",
    ),
    "value length": (key("llama.attention.value_length", 4), "llama.attention.value_length"),
    "rope": (key("llama.rope.dimension_count", 4), "llama.rope.dimension_count"),
    "rope type": (key("llama.rope.scaling.type", "odd"), "llama.rope.scaling.type"),
    "absurd": (key("llama.block_count", 1 << 31), "llama.block_count"),
    "more layers than tensors": (key("llama.block_count", 1395), "llama.block_count"),
    "no heads": (key("llama.attention.head_count", 0), "llama.attention.head_count"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_served_is_refused_by_key(tmp_path: Path, case: str) -> None:
    edit, field = CONFIGS[case]
    model = Written(tmp_path, "llama", SMALL)
    edit(model)
    with pytest.raises(ConfigError) as caught:
        resolve(str(model.write().path))
    assert caught.value.field == field


def cut(n: int) -> Edit:
    return lambda data: data[:n]


def at(place: int, value: bytes) -> Edit:
    return lambda data: data[:place] + value + data[place + len(value) :]


def swap(old: bytes, new: bytes) -> Edit:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


HUGE = struct.pack("<Q", 1 << 60)
NAME = files.text("blk.0.ffn_up.weight")
FIRST = NAME + struct.pack("<IQQ", 2, 32, 64)
FILES: dict[str, tuple[Edit, str]] = {
    "empty": (cut(0), "empty"),
    "no gguf": (at(0, b"GGML"), "no GGUF"),
    "short": (cut(20), "ends in the header"),
    "version": (at(4, struct.pack("<I", 1)), "version 1"),
    "big-endian": (at(4, struct.pack(">I", 3)), "big-endian"),
    "tensors": (at(8, HUGE), "tensors; at most"),
    "keys": (at(16, HUGE), "keys; at most"),
    "long key": (at(24, HUGE), "a text of"),
    "key is no text": (at(32, b"\xff"), "UTF-8"),
    "cut data": (cut(-1000), "ends at byte"),
    "twice": (
        swap(NAME, files.text("blk.0.ffn_gate.weight")[:8] + b"blk.0.ffn_gate.weight"),
        "twice",
    ),
    "dimensions": (swap(NAME + struct.pack("<I", 2), NAME + struct.pack("<I", 9)), "dimensions"),
    "sizes": (swap(FIRST, FIRST[:-8] + HUGE), "shape"),
    "type": (
        swap(FIRST + struct.pack("<I", 0), FIRST + struct.pack("<I", 16)),
        "IQ2_XXS is not read",
    ),
    "no type": (swap(FIRST + struct.pack("<I", 0), FIRST + struct.pack("<I", 99)), "number 99"),
    "blocks": (swap(FIRST + struct.pack("<I", 0), FIRST + struct.pack("<I", 12)), "blocks of 256"),
    "offset": (
        swap(FIRST + struct.pack("<IQ", 0, 0), FIRST + struct.pack("<IQ", 0, 1)),
        "multiple",
    ),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("gguf")
    model = Written(path, "llama", SMALL)
    first = {"blk.0.ffn_up.weight": model.tensors.pop("blk.0.ffn_up.weight")}
    model.tensors = first | model.tensors
    return path / "broken.gguf", model.write().path.read_bytes()


@pytest.mark.parametrize("case", FILES)
def test_a_broken_file_is_refused(small: tuple[Path, bytes], case: str) -> None:
    (path, data), (edit, says) = small, FILES[case]
    path.write_bytes(edit(data))
    with pytest.raises(WeightsError, match=says) as caught:
        resolve(str(path))
    assert str(caught.value.field).startswith(str(path))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("general.alignment", 24, "power of two"),
        ("x", [[[1]]], "arrays in arrays"),
    ],
)
def test_a_broken_key_is_refused(tmp_path: Path, name: str, change: Any, says: str) -> None:
    model = Written(tmp_path, "llama", SMALL)
    nested = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1)
    model.metadata[name] = 1234567 if isinstance(change, list) else change
    data = model.write().path.read_bytes()
    if isinstance(change, list):
        data = data.replace(struct.pack("<II", 4, 1234567), nested)
    model.path.write_bytes(data)
    with pytest.raises(WeightsError, match=says):
        header.read(model.path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    model = Written(tmp_path, "llama", SMALL)
    last = list(model.tensors)[-1]
    data = model.path.read_bytes()
    place = data.index(files.text(last)) + len(files.text(last)) + 4
    place += 8 * len(model.tensors[last][1]) + 4
    model.path.write_bytes(data[:place] + bytes(8) + data[place + 8 :])
    with pytest.raises(WeightsError, match="overlaps"):
        header.read(model.path)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = Written(tmp_path, "llama", CONFIG, MIXED)
    kind, shape, stored = model.tensors["blk.0.ffn_up.weight"]
    model.tensors["blk.0.ffn_up.weight"] = (kind, shape, b"\x00\x7c" + stored[2:])
    model.write()
    with pytest.raises(WeightsError, match=r"up_proj\.blocks: scales must be finite"):
        loaded(model)


def test_a_load_format_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = Written(tmp_path, "llama", SMALL)
    with pytest.raises(ConfigError) as caught:
        resolve(str(model.path), load_format="orbax")
    assert caught.value.field == "load_format"


def test_an_unknown_type_in_a_config_is_refused() -> None:
    config = {"quantization_config": {"quant_method": "gguf", "types": {"a": "Q2_K"}}}
    with pytest.raises(ConfigError) as caught:
        scheme_of(config, jnp.float32)
    assert caught.value.field == "quantization_config.types.a"


@pytest.mark.slow
def test_the_engine_serves_one_file(tmp_path: Path) -> None:
    """Greedy tokens of the file, in its forms and widened."""
    from jserve.llm import LLM
    from jserve.sampling import SamplingParams

    made = trained(QWEN2)
    tokens = header_of(made, "qwen2", ("<s>", "</s>"))
    tokens["tokenizer.chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = Written(tmp_path, "llama", CONFIG | {"vocab_size": 332}, MIXED, **tokens)
    found = []
    for asked in ("auto", "none"):
        small = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 32}
        options = small | {"dtype": "float32", "compile_cache": ""}
        with LLM(str(model.path), quantization=asked, **options) as llm:
            how = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            [out] = llm.chat([[{"role": "user", "content": "hello there"}]], how)
            found.append(out.outputs[0].token_ids)
    assert len(found[0]) == 8
    assert found[0] == found[1]
