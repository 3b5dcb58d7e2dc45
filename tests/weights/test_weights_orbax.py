"""Conversion to Orbax and back onto other meshes; broken and mismatching checkpoints."""

from __future__ import annotations

import gc
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.weights import orbax
from jserve.weights.convert import convert
from jserve.weights.loader import load
from jserve.weights.source import resolve
from tests.weights.weights_kit import BF16, LLAMA, Model, same

RULES = ShardRules()
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    """Orbax leaves the coroutines of a failed read to the garbage collector: let it run here."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("hf") / "m", LLAMA).sharded()


@pytest.fixture(scope="module")
def converted(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "evil.py"):
        (model.path / name).write_text("{}")
    target = tmp_path_factory.mktemp("orbax") / "out"
    assert convert(str(model.path), target).format == "orbax"
    return target


def from_dir(path: Path, tp: int, dtype: Any = BF16, **options: Any) -> Any:
    source = resolve(str(path))
    family = family_for(source.config)
    arch = family.arch(source.config)
    return load(family, arch, source, make_mesh(tp), RULES, dtype, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tp", "dtype"), [(1, BF16), (2, BF16), (8, BF16), (4, jnp.float32)])
def test_restores_onto_another_mesh(model: Model, converted: Path, tp: int, dtype: Any) -> None:
    """tp 4 and 8 exceed the two kv heads: there the restored parameter is laid out anew."""
    seen: list[Any] = []
    want = from_dir(model.path, tp, dtype)
    got = from_dir(converted, tp, dtype, progress=lambda *step: seen.append(step))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert same(a, b)
        assert a.sharding == b.sharding
    assert seen[-1][1] == seen[-1][2]
    assert len(seen) == len(jax.tree.leaves(want))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_odd_vocabulary_is_stored_whole_and_padded_on_the_way_back(
    tmp_path: Path, tp: int
) -> None:
    model = Model(tmp_path / "m", LLAMA | {"vocab_size": 61}).single()
    convert(str(model.path), tmp_path / "out")
    stored = orbax._stored_tree(tmp_path / "out/params")
    assert tuple(stored["embed"].shape) == tuple(stored["unembed"].shape) == (61, 32)
    want, got = from_dir(model.path, tp), from_dir(tmp_path / "out", tp)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert same(a, b)
        assert a.sharding == b.sharding


FAMILIES = ("gemma", "gemma3", "phi3-window-partial", "cohere2", "gpt-oss", "llama4", "glm4")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("case", FAMILIES)
def test_families_come_back_on_other_meshes(tmp_path: Path, case: str, tp: int) -> None:
    """With other parameters than Llama's: tied tables, fused tensors, sinks, experts with biases."""
    from tests.model.hf import SIZES, config_of
    from tests.model.test_parity import CASES

    name, config = CASES[case]
    config = {key: value for key, value in (SIZES | config).items() if key != "seed"}
    stated = config_of(name, **config).to_dict() | {"architectures": [name]}
    model = Model(tmp_path / "m", json.loads(json.dumps(stated, default=str))).single()
    assert convert(str(model.path), tmp_path / "out").format == "orbax"
    want, got = from_dir(model.path, tp), from_dir(tmp_path / "out", tp)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert same(a, b)
        assert a.sharding == b.sharding


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shard", range(4))
def test_the_scan_looks_at_every_shard(model: Model, tmp_path: Path, shard: int) -> None:
    params = from_dir(model.path, 1)
    params["unembed"] = params["unembed"].at[16 * shard + 3, 0].set(jnp.nan)
    orbax.save(tmp_path / "out", params, model.path)
    with pytest.raises(WeightsError, match="NaN") as caught:
        from_dir(tmp_path / "out", 4)
    assert caught.value.field == f"{tmp_path / 'out/params'}:unembed"


def test_copies_text_files_and_no_code(converted: Path) -> None:
    names = {p.name for p in converted.iterdir()}
    assert names == {
        "params",
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    }


def test_convert_can_change_the_dtype(model: Model, tmp_path: Path) -> None:
    convert(str(model.path), tmp_path / "out", dtype="float32")
    a, b = from_dir(tmp_path / "out", 1, jnp.float32), from_dir(model.path, 1, jnp.float32)
    assert all(same(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_convert_refuses_a_full_target(model: Model, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        convert(str(model.path), tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError) as caught:
        convert(str(model.path), tmp_path / "file")
    assert caught.value.field == str(tmp_path / "file")
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["file", "precious"]


def test_unfinished_conversion_is_refused(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "m")
    (tmp_path / "m/config.json").unlink()
    with pytest.raises(ConfigError) as caught:
        resolve(str(tmp_path / "m"))
    assert caught.value.field == str(tmp_path / "m/config.json")


@pytest.mark.parametrize(
    ("change", "parameter", "says"),
    [
        (
            {"intermediate_size": 96},
            "layers.0.down",
            "shape (32, 64), the config asks for (32, 96)",
        ),
        ({"num_hidden_layers": 3}, "layers.2.attn_norm", "missing"),
        ({"num_hidden_layers": 1}, "layers.1.attn_norm", "not a parameter"),
        ({"attention_bias": True}, "layers.0.o_bias", "missing"),
    ],
)
def test_mismatch_names_the_parameter(
    converted: Path, tmp_path: Path, change: dict[str, Any], parameter: str, says: str
) -> None:
    shutil.copytree(converted, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text()) | change
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError) as caught:
        from_dir(tmp_path / "m", 2)
    assert caught.value.field == f"{tmp_path / 'm/params'}:{parameter}"
    assert says in caught.value.message


def test_missing_data_names_a_parameter(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "m")
    blobs = (p for p in (tmp_path / "m/params").rglob("d/*") if p.is_file())
    max(blobs, key=lambda p: p.stat().st_size).unlink()
    with pytest.raises(WeightsError, match=r"parameter .* cannot be restored") as caught:
        from_dir(tmp_path / "m", 2)
    assert caught.value.field is not None
    assert caught.value.field.startswith(f"{tmp_path / 'm/params'}:")
    assert "\n" not in caught.value.message


def test_the_parameter_that_fails_is_the_one_named(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are read in groups; the storage error of a group says nothing of which one."""
    good, sizes = orbax._restored, []

    def flaky(root: Path, canonical: Any, abstract: Any, group: list[int]) -> Any:
        sizes.append(len(group))
        if 6 in group:
            raise ValueError("outer") from OSError("disk on fire\nsecond line")
        return good(root, canonical, abstract, group)

    monkeypatch.setattr(orbax, "_restored", flaky)
    with pytest.raises(WeightsError, match=r"OSError: disk on fire$") as caught:
        from_dir(converted, 1)
    assert caught.value.field == f"{converted / 'params'}:layers.0.o"
    assert max(sizes) > 1


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
@pytest.mark.parametrize("how", ["cut", "gone", "garbage"])
def test_broken_metadata_is_refused(converted: Path, tmp_path: Path, name: str, how: str) -> None:
    shutil.copytree(converted, tmp_path / "m")
    path = tmp_path / "m/params" / name
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "gone": b"", "garbage": b"\xff" * 99}[how])
    if how == "gone":
        path.unlink()
    with pytest.raises(WeightsError) as caught:
        from_dir(tmp_path / "m", 1)
    assert str(tmp_path / "m/params") in str(caught.value.field)


def test_corruption_never_escapes_as_anything_else(converted: Path, tmp_path: Path) -> None:
    rng, refused = random.Random(3), 0
    files = sorted(p for p in converted.rglob("params/**/*") if p.is_file())
    values = max(
        files, key=lambda p: p.stat().st_size
    )  # a flipped bit of another may change nothing
    for i in range(12):
        target, cut = tmp_path / str(i), i % 3 == 0
        shutil.copytree(converted, target)
        path = target / (values if cut else rng.choice(files)).relative_to(converted)
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data[:at] if cut else data)
        try:
            from_dir(target, 2)
        except WeightsError:
            refused += 1
    assert refused >= 4, "each file of values that was cut"


def test_nan_in_a_checkpoint_is_refused(model: Model, tmp_path: Path) -> None:
    params = from_dir(model.path, 1)
    params["layers"][1]["o"] = params["layers"][1]["o"].at[3, 4].set(jnp.nan)
    orbax.save(tmp_path / "out", params, model.path)
    with pytest.raises(WeightsError, match="has NaN") as caught:
        from_dir(tmp_path / "out", 2, scan_nan="full")
    assert str(caught.value.field).endswith("params:layers.1.o")


def test_nan_is_not_converted(tmp_path: Path) -> None:
    broken = Model(tmp_path / "m", LLAMA)
    broken.tensors["model.norm.weight"][1] = float("nan")
    broken.single()
    with pytest.raises(WeightsError, match="has NaN"):
        convert(str(broken.path), tmp_path / "out")
