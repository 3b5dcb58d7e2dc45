"""``jserve quantize``: directories that are read back bit for bit, jobs that go on, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.layer_pass import layer_pass
from jserve.model.mesh import make_mesh
from jserve.model.quant import QTensor, quantised_leaves, widened
from jserve.model.shard import ShardRules
from jserve.weights.loader import load
from jserve.weights.offline import job
from jserve.weights.offline.export import packed_words, tensors_of
from jserve.weights.offline.folds import Turn, can_divide, divided
from jserve.weights.offline.job import quantize
from jserve.weights.offline.wish import Wish
from jserve.weights.quant.rounding import numbers_of, scales_of
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.weights.test_weights_moe import respelled
from tests.weights.test_weights_quant import loaded
from tests.weights.test_weights_quant_moe import DEEPSEEK, GPT_OSS, QWEN
from tests.weights.weights_kit import LLAMA, Model

CONFIG = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 8,
    "torch_dtype": "bfloat16",
}
TEXTS = [[int(t) for t in np.random.default_rng(i).integers(0, 64, 20 + i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    made = Model(tmp_path_factory.mktemp("model"), CONFIG)
    made.write_json("config.json", made.config)
    made.single()
    return made


def read(path: Path, tp: int = 1) -> Any:
    source = resolve(str(path))
    scheme = scheme_of(source.config, jnp.float32)
    family = quantised(family_for(source.config), scheme)
    arch = family.arch(source.config)
    rules = ShardRules()
    return load(family, arch, source, make_mesh(tp), rules, jnp.float32, scheme=scheme)


def files(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "wish",
    [
        Wish(scheme="int4", config='{"group_size": 32, "ignore": ["re:.*o_proj", "lm_head"]}'),
        Wish(scheme="fp8"),
        pytest.param(Wish(scheme="int8"), marks=pytest.mark.slow),
        pytest.param(Wish(scheme="int8-weight-only", method="hqq"), marks=pytest.mark.slow),
    ],
    ids=lambda wish: wish.scheme,
)
def test_a_directory_is_read_bit_for_bit(tmp_path: Path, model: Model, wish: Wish) -> None:
    """The numbers of the method, under scales as the type of the model has them; o stays where it is ignored."""
    quantize(str(model.path), tmp_path / "out", wish, [])
    found = read(tmp_path / "out")["layers"]
    modules, n_wide = wish.modules("float32"), 0
    for i, spec in enumerate(model.family.specs(model.arch, 1)["layers"]):
        for name in ("qkv", "o", "gate_up", "down"):
            module = spec[name].parts[0].name.removesuffix(".weight")
            w = assemble_all(spec[name], model.tensors.__getitem__, jnp.float32)
            form = modules.form_of(module, w.shape[-1])
            if form is not None:
                wide = jnp.asarray(w).reshape(-1, w.shape[-1])
                scale = scales_of(wide, form).astype(jnp.bfloat16).astype(jnp.float32)
                q = np.asarray(numbers_of(wide, scale, form)).astype(np.float32)
                groups = scale.shape[1]
                q = q.reshape(q.shape[0], groups, -1) * np.asarray(scale)[..., None]
                w = q.reshape(w.shape)
            x = found[i][name]
            assert isinstance(x, QTensor) == (form is not None)
            n_wide += form is None
            np.testing.assert_array_equal(np.asarray(widened(x) if form else x), np.asarray(w))
    assert n_wide == (2 if wish.config else 0)


def test_packed_words_hold_values_lowest_bits_first() -> None:
    q = np.random.default_rng(0).integers(-8, 8, (3, 20)).astype(np.int8)
    words = packed_words(q, 4).view(np.uint32)
    assert words.shape == (3, 3)
    got = [[(int(words[r, i // 8]) >> (4 * (i % 8)) & 15) - 8 for i in range(20)] for r in range(3)]
    np.testing.assert_array_equal(got, q)


def test_parameters_become_the_tensors_that_they_were_made_of(model: Model) -> None:
    for spec in jax.tree.leaves(
        model.family.specs(model.arch, 1), is_leaf=lambda x: hasattr(x, "parts")
    ):
        made = np.asarray(assemble_all(spec, model.tensors.__getitem__, jnp.float32))
        for name, x in tensors_of(spec, made).items():
            np.testing.assert_array_equal(x, np.asarray(model.tensors[name], np.float32))


def wide_layer(model: Model, i: int = 0) -> dict[str, np.ndarray]:
    specs = model.family.specs(model.arch, 1)["layers"][i]
    made = assemble_all(specs, model.tensors.__getitem__, jnp.float32)
    return {name: np.asarray(x) for name, x in made.items()}


def leaves(model: Model, p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    on = {name: jnp.asarray(a, jnp.float32) for name, a in p.items()}
    return np.asarray(layer_pass(model.arch, 0, on, jnp.asarray(x))[0])


def assert_near(found: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


def test_scales_that_are_folded_leave_a_layer_as_it_is(model: Model) -> None:
    rng = np.random.default_rng(0)
    p, x = wide_layer(model), rng.standard_normal((2, 12, 64)).astype(np.float32)
    want = leaves(model, p, x)
    spec = model.arch.layers[0]
    for name in ("qkv", "o", "gate_up", "down"):
        assert can_divide(spec, p, name)
        s_D = np.exp(rng.standard_normal(p[name].shape[-1])).astype(np.float32)
        if name == "o":
            s_D = np.repeat(s_D.reshape(2, 4, 8)[:, :1], 4, axis=1).reshape(-1)
        folded, taken = divided(model.arch, spec, p, name, s_D, jnp.bfloat16)
        assert np.abs(folded[name] - p[name]).max() > 0.001
        np.testing.assert_allclose(taken, s_D, rtol=0.01)
        assert_near(leaves(model, folded, x), want)


def test_a_rotated_layer_computes_the_same_on_the_rotated_stream(model: Model) -> None:
    x = np.random.default_rng(0).standard_normal((1, 12, 64)).astype(np.float32)
    p, turn = wide_layer(model), Turn(model.arch)
    turned = turn.layer(model.arch.layers[0], p)
    want = leaves(model, p, x) @ turn.stream_DD
    assert_near(leaves(model, turned, x @ turn.stream_DD), want)
    assert (turned["attn_norm"] == 1).all()


class _Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "wish",
    [
        Wish(scheme="int4", method="gptq", config='{"group_size": 32}'),
        Wish(scheme="int8", smooth=0.5, rotate=True),
    ],
    ids=["gptq", "smooth and rotate"],
)
def test_a_job_that_was_ended_goes_on_to_the_same_bytes(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, wish: Wish
) -> None:
    quantize(str(model.path), tmp_path / "whole", wish, TEXTS)

    def told(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise _Killed

    with pytest.raises(_Killed):
        quantize(str(model.path), tmp_path / "out", wish, TEXTS, told)
    assert not (tmp_path / "out").exists()
    half = _kept(tmp_path / "out.partial")
    writes: list[str] = []
    real: Callable[..., None] = job.write_safetensors
    monkeypatch.setattr(
        job, "write_safetensors", lambda path, x: (writes.append(path.name), real(path, x))
    )
    quantize(str(model.path), tmp_path / "out", wish, TEXTS)
    assert half
    assert not {*half} & {*writes}
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def _kept(path: Path) -> list[str]:
    return [p.name for p in path.glob("*.safetensors")]


def test_an_unfinished_job_of_another_kind_is_refused(tmp_path: Path, model: Model) -> None:
    out = tmp_path / "out"

    def told(*_: Any) -> None:
        raise _Killed

    with pytest.raises(_Killed):
        quantize(str(model.path), out, Wish(scheme="int8"), [], told)
    with pytest.raises(ConfigError, match="another, unfinished job") as caught:
        quantize(str(model.path), out, Wish(scheme="fp8"), [])
    assert caught.value.field == f"{out}.partial"


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path: Path, model: Model) -> None:
    out = tmp_path / "out"
    quantize(str(model.path), out, Wish(scheme="int8"), [])
    with pytest.raises(ConfigError, match="is quantised already"):
        quantize(str(out), tmp_path / "again", Wish(scheme="int8"), [])
    with pytest.raises(ConfigError, match="is not empty"):
        quantize(str(model.path), out, Wish(scheme="int8"), [])
    with pytest.raises(ConfigError, match="there is no text"):
        quantize(str(model.path), tmp_path / "a", Wish(scheme="int4", method="gptq"), [])
    every = Wish(scheme="int8", config='{"ignore": ["re:.*"]}')
    with pytest.raises(ConfigError, match="leaves nothing"):
        quantize(str(model.path), tmp_path / "b", every, [])


@pytest.mark.parametrize("scheme", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["one by one", "all together", "latents"])
def test_experts_and_latents_are_rounded_as_on_load(tmp_path: Path, kind: str, scheme: str) -> None:
    """Read back, each matrix is what the option makes of it, but for its scale, which is stored in bfloat16."""
    made = Model(tmp_path / "moe", DEEPSEEK if kind == "latents" else QWEN)
    made = (respelled(made) if kind == "all together" else made).single()
    out = quantize(str(made.path), tmp_path / "out", Wish(scheme=scheme), [])
    got, want = read(out), loaded(made, 1, scheme)
    assert jax.tree.structure(forms(got)) == jax.tree.structure(forms(want))
    for a, b in zip(quantised_leaves(got), quantised_leaves(want), strict=True):
        if isinstance(a, QTensor):
            step = np.repeat(np.asarray(b.scale), b.shape[-1] // b.scale.shape[-1], axis=-1)
            assert (np.abs(np.asarray(widened(a)) - np.asarray(widened(b))) <= 1.01 * step).all()
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def forms(tree: Any) -> Any:
    """The kind of numbers and the group of each matrix."""
    of = {"is_leaf": lambda x: isinstance(x, QTensor)}
    return jax.tree.map(
        lambda x: {f"{x.form.kind} {x.form.group}": 0} if isinstance(x, QTensor) else 0, tree, **of
    )


@pytest.mark.parametrize(
    ("config", "wish", "word"),
    [
        (QWEN, Wish(scheme="int4", method="gptq"), "more than rounding is for dense models"),
        (DEEPSEEK, Wish(scheme="int8", rotate=True), "more than rounding is for"),
        (GPT_OSS | {"quantization_config": None}, Wish(scheme="int8"), "all in one tensor"),
    ],
)
def test_what_experts_and_latents_cannot_have_is_refused_by_name(
    tmp_path: Path, config: Any, wish: Wish, word: str
) -> None:
    made = Model(tmp_path / "moe", config).single()
    with pytest.raises(ConfigError, match=word):
        quantize(str(made.path), tmp_path / "out", wish, [])


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"scheme": "int3"}, "scheme 'int3'"),
        ({"scheme": "int4", "method": "spqr"}, "method 'spqr'"),
        ({"scheme": "int4", "smooth": 2.0}, "smooth must be"),
        ({"scheme": "int4", "smooth": 0.5, "method": "awq"}, "choose one"),
        ({"scheme": "int4", "config": "[]"}, "JSON object"),
        ({"scheme": "int4", "config": '{"method": "mse"}'}, "JSON object"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Wish(**given)
