"""A warm start loads every program and traces nothing; what does not check is compiled as if it were not there."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jserve import build_runner
from jserve.config import EngineConfig
from jserve.model.arch import Norm, resized
from jserve.model.feature import StepFeature
from jserve.model.features.score import SCORE
from jserve.model.mesh import make_mesh
from jserve.model.step import StepModel
from jserve.model.view import Bucket
from jserve.runner import compiler as compiling, program_files, program_key
from jserve.runner.compiler import Compiler
from jserve.runner.program_files import ProgramFiles, Unusable
from jserve.runner.program_key import UnknownCode, described
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.eagle3 import eagle3
from jserve.speculation.drafters.medusa import medusa
from jserve.speculation.drafters.prompt_lookup import ngram
from tests.runner.harness import ARCH, LLAMA, SMALL, Rig, jobs, make_runner, shared, tiny_params

X = np.arange(8, dtype=np.float32)


class Work:
    """What jax traced, lowered and compiled, by event, from ``began`` on."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seen[event.rpartition("/")[2]] += 1

    def of(self, make: Callable[[], Any]) -> tuple[Any, Counter[str]]:
        self.seen.clear()
        made = make()
        return made, Counter(self.seen)


WORK = Work()


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], None]]:
    """An empty compile cache of this test's own; a call empties it again. What other tests of this process compiled is
    forgotten too: of a program that jax had in memory nobody knows where it came from, so it would not be kept."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}

    def empty() -> None:
        jax.clear_caches()
        compilation_cache.reset_cache()
        jax.config.update(names[0], str(tmp_path_factory.mktemp("jax")))
        jax.config.update(names[1], 0.0)

    empty()
    yield empty
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ProgramFiles]:
    made = ProgramFiles(tmp_path)
    yield made
    made.close()


def model() -> StepModel:
    return shared().model


def kept(root: Path) -> list[Path]:
    """The programs, without the other names that they have."""
    found = (root / program_files.DIRECTORY).iterdir()
    return sorted(path for path in found if path.stat().st_size > 200)


def made(files: ProgramFiles | None, name: str = "double", **how: Any) -> str:
    """How a program that doubles ``X`` came to be: loaded, same (lowered, then loaded) or compiled."""
    of = how.pop("model", None) or model()
    compiler, whole = Compiler(of, files), NamedSharding(of.mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct(X.shape, how.pop("dtype", X.dtype), sharding=whole)
    jitted = jax.jit(lambda x: x * 2)
    program, work = WORK.of(lambda: compiler(name, jitted, x, **how))
    np.testing.assert_array_equal(program(jax.device_put(X.astype(x.dtype), whole)), 2 * X)
    assert (name in compiler.loaded) == (not work["backend_compile_duration"])
    if name not in compiler.loaded:
        return "compiled"
    return "same" if work else "loaded"


def test_a_warm_start_traces_nothing_and_says_the_same(tmp_path: Path) -> None:
    params = [tiny_params(make_mesh(1)) for _ in range(2)]
    some = [*jobs(2, temperature=0.0), *jobs(1, 1, temperature=1.0, logit_bias={4: 1.0})]

    def start() -> Any:
        directory = ProgramFiles(tmp_path)
        try:
            return make_runner(
                params=params.pop(), files=directory, host_memory_gb=0.001, strict=True
            )
        finally:
            directory.close()

    cold, compiled = WORK.of(start)
    assert compiled["jaxpr_trace_duration"] >= len(SMALL)
    assert compiled["jaxpr_to_mlir_module_duration"] >= len(SMALL)
    warm, loaded = WORK.of(start)
    assert not loaded, "a warm start traces, lowers or compiles"
    assert cold.report()["programs_loaded"] == 0
    assert warm.report()["programs_loaded"] == len(warm.programs) == len(SMALL) + 2
    for bucket in SMALL:
        state = sum(x.nbytes for x in jax.tree.leaves(warm.state))
        assert warm.programs.memory(bucket).alias_size_in_bytes == state
        temp = [r.programs.memory(bucket).temp_size_in_bytes for r in (warm, cold)]
        assert temp[0] == temp[1]
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(warm.state.kv)}
    assert Rig(warm).run(some) == Rig(cold).run(some)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(warm.state.kv)} == before
    assert warm.programs.late_compiles == 0
    warm.update_weights(tiny_params(make_mesh(1), seed=1))
    warm.reset()
    assert warm.programs.late_compiles == 0


def test_programs_of_several_devices_are_loaded_on_theirs(files: ProgramFiles) -> None:
    on_two = dataclasses.replace(model(), mesh=make_mesh(2))
    sharding = NamedSharding(on_two.mesh, PartitionSpec("tp"))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    for loaded in (False, True):
        compiler = Compiler(on_two, files)
        program = compiler("sum", jax.jit(lambda x: x + x.sum()), x)
        out = program(jax.device_put(X, sharding))
        np.testing.assert_array_equal(out, X + X.sum())
        assert out.sharding.device_set == set(on_two.mesh.devices.flat)
        assert ("sum" in compiler.loaded) == loaded


def put(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


SPOILED: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda path: put(path, lambda data: data[:-100]),
    "cut in its head": lambda path: put(path, lambda data: data[:20]),
    "empty": lambda path: put(path, lambda data: b""),
    "a bit flipped": lambda path: put(path, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "of an older format": lambda path: put(path, lambda data: b"JSX0" + data[4:]),
    "writable by a group": lambda path: path.chmod(0o620),
    "writable by all": lambda path: path.chmod(0o602),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_file_that_does_not_check_is_compiled_again(
    spoil: Callable[[Path], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fresh_cache: Callable[[], None],
) -> None:
    files = ProgramFiles(tmp_path)
    made(files)
    assert made(files) == "loaded"
    [path] = kept(tmp_path)
    spoil(path)
    fresh_cache()
    with caplog.at_level(logging.WARNING):
        assert made(files) == "compiled"
    assert len([m for m in caplog.messages if "is not used" in m]) == 1
    if not path.is_dir():
        assert made(files) == "loaded", "what was compiled takes its place"


class Planted:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def plant(path: Path, mark: Path) -> None:
    body = pickle.dumps(Planted(mark)) + bytes(300)
    path.write_bytes(program_files._head(path.stem, body) + body)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "writable by a group": lambda path: path.chmod(0o660),
    "of another user": lambda path: os.chown(path, 12345, -1),
    "renamed": lambda path: path.replace(path.with_name("0" * 64 + ".program")),
}


@pytest.mark.parametrize("by", FOREIGN.values(), ids=FOREIGN)
def test_a_planted_file_is_never_unpickled(by: Callable[[Path], Any], tmp_path: Path) -> None:
    if by is FOREIGN["of another user"] and os.getuid():
        pytest.skip("only root gives files away")
    files, mark = ProgramFiles(tmp_path), tmp_path / "mark"
    made(files)
    [path] = kept(tmp_path)
    plant(path, mark)
    by(path)
    [planted] = kept(tmp_path)
    assert files.load(planted.stem, (X,), jax.devices()[:1]) is None
    assert not mark.exists()
    plant(path, mark)
    path.chmod(0o600)
    os.chown(path, os.getuid(), -1)
    assert files.load(path.stem, (X,), jax.devices()[:1]) is None
    assert mark.exists(), "the same file of our own is read: the plant works"


def test_a_directory_of_others_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / program_files.DIRECTORY
    directory.mkdir(mode=0o770)
    directory.chmod(0o770)
    with pytest.raises(Unusable, match="other users"):
        ProgramFiles(tmp_path)
    config = EngineConfig.of(compile_cache=str(tmp_path))
    with build_runner.program_files(config, "cpu") as found:
        assert found is None
    assert len([m for m in caplog.messages if "other users" in m]) == 1
    directory.chmod(0o700)
    with build_runner.program_files(config, "cpu") as found:
        assert isinstance(found, ProgramFiles)
    with build_runner.program_files(config, "gpu") as found:
        assert found is None
    for options in ({"compile_cache": ""}, {"plugins": "some.py"}):
        other = EngineConfig.of(**{"compile_cache": str(tmp_path), **options})
        with build_runner.program_files(other, "cpu") as found:
            assert found is None
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(Unusable):
        ProgramFiles(tmp_path)
    directory.unlink()
    directory.write_text("")
    with pytest.raises(Unusable):
        ProgramFiles(tmp_path)


def _replaced(**changes: Any) -> Callable[[pytest.MonkeyPatch], dict[str, Any]]:
    return lambda patch: {"model": dataclasses.replace(model(), **changes)}


def _patched(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], dict[str, Any]]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(name, value)
        return {}

    return patch


def _version(package: str) -> Callable[[pytest.MonkeyPatch], dict[str, Any]]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        real = importlib.metadata.version
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name: "0.0.1" if name == package else real(name)
        )
        return {}

    return patch


def _flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")
    return {}


KEY = "jserve.runner.program_key."
SHAPING: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "options": lambda patch: {"options": {"xla_cpu_enable_fast_math": True}},
    "type": lambda patch: {"dtype": jnp.bfloat16},
    "mesh": lambda patch: _replaced(mesh=make_mesh(2))(patch),
    "jax": _version("jax"),
    "jaxlib": _version("jaxlib"),
    "processor": _patched(KEY + "_processor", lambda: ("z80",)),
    "cores": _patched(KEY + "n_cores", lambda: 99),
    "format": _patched(KEY + "FORMAT", 99),
    "flags": _flags,
    "option of jax": lambda patch: jax.config.update("jax_default_matmul_precision", "high") or {},
}
"""What makes another program of the same text."""
TRACED: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "name": lambda patch: {"name": "triple"},
    "bucket": lambda patch: {"about": Bucket(D=2, P=0, F=0)},
    "dims": lambda patch: _replaced(dims=dataclasses.replace(model().dims, M=9))(patch),
    "arch": lambda patch: _replaced(arch=dataclasses.replace(ARCH, norm=Norm(eps=1e-4)))(patch),
    "pages": _replaced(n_pages=5),
    "attention": lambda patch: {"model": shared(attention_backend="ref").model},
    "level of the kernels": _replaced(kernels="avx2"),
    "source": _patched("jserve.runner.compiler.source_digest", lambda: "0"),
}
"""What may make another text: nothing is loaded before that is looked at."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", [*SHAPING.values(), *TRACED.values()], ids=[*SHAPING, *TRACED])
def test_whatever_shapes_a_program_is_in_its_key(
    change: Callable[[pytest.MonkeyPatch], dict[str, Any]],
    files: ProgramFiles,
    monkeypatch: pytest.MonkeyPatch,
    fresh_cache: Callable[[], None],
) -> None:
    made(files)
    assert made(files) == "loaded"
    fresh_cache()
    try:
        how = change(monkeypatch)
        assert made(files, **how) == ("compiled" if change in SHAPING.values() else "same")
        assert made(files, **how) == "loaded"
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def test_a_program_that_the_compile_cache_gave_is_not_kept(tmp_path: Path) -> None:
    """XLA serialises it without its code: it would fail, or compute something else."""
    one, two = (ProgramFiles(tmp_path / name) for name in "ab" if not (tmp_path / name).mkdir())
    assert made(one) == "compiled"
    assert made(two) == "compiled"
    assert len(kept(tmp_path / "a")) == 1
    assert not kept(tmp_path / "b")


def test_the_source_is_that_of_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = program_key.source_digest()
    monkeypatch.setattr(program_key, "OURS", ("jserve",))
    assert program_key.source_digest.__wrapped__() != whole


def test_a_program_with_code_of_others_is_not_kept(
    files: ProgramFiles,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fresh_cache: Callable[[], None],
) -> None:
    caplog.set_level(logging.INFO)
    mine = StepFeature(name="mine", after=lambda target, outcome: outcome.x_TD)
    made(files, about=Bucket(D=2, P=0, F=0, features=(mine,)))
    family = dataclasses.replace(
        LLAMA, forward=lambda ctx, params, kv: LLAMA.forward(ctx, params, kv)
    )
    made(files, model=dataclasses.replace(model(), family=family))
    assert not kept(tmp_path)
    assert len([m for m in caplog.messages if "not kept" in m and __name__ in m]) == 2
    fresh_cache()
    made(files, about=Bucket(D=2, P=0, F=0, features=(SCORE,)))
    assert len(kept(tmp_path)) == 1


def test_what_a_function_holds_is_described() -> None:
    def inner(x: int) -> Callable[[], int]:
        return lambda: x

    one, two = inner(1), inner(2)
    for function in (one, two):
        function.__module__ = "jserve.made_up"
    assert described(one) != described(two)
    assert described((one, 3)) == described((one, 3))
    for unknown in (object(), {1, 2}, inner(object()), test_what_a_function_holds_is_described):
        with pytest.raises(UnknownCode):
            described(unknown)


def test_programs_with_every_drafter_are_kept() -> None:
    drafters = [
        ngram(ARCH, least=1, most=3, window=64),
        draft_model(LLAMA, ARCH, ARCH),
        medusa(ARCH, n_heads=2),
        eagle3(ARCH, ARCH, taps=(0, 1, 2), own_embed=False),
    ]
    texts = {described(dataclasses.replace(model(), drafter=drafter)) for drafter in drafters}
    assert len(texts) == len(drafters)
    other = draft_model(LLAMA, resized(ARCH, L=1), ARCH)
    assert described(other) != described(drafters[1])


def test_those_used_longest_ago_go_first(tmp_path: Path) -> None:
    types = (jnp.float32, jnp.bfloat16, jnp.float16)
    files, directory = ProgramFiles(tmp_path), tmp_path / program_files.DIRECTORY
    for dtype in types:
        assert made(files, dtype=dtype) == "compiled"
        for path in directory.iterdir():
            os.utime(path, (1, path.stat().st_mtime - 1000))
    total = sum(path.stat().st_size for path in directory.iterdir())
    assert made(files, dtype=types[0]) == "loaded", "it is the newest now"
    small = ProgramFiles(tmp_path, most_bytes=total + 1000)
    made(small, dtype=jnp.int32)
    assert len(kept(tmp_path)) == 3
    used = (types[0], types[2], jnp.int32)
    assert [made(small, dtype=dtype) for dtype in used] == ["loaded"] * 3
    assert made(small, dtype=types[1]) == "compiled"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert made(ProgramFiles(fresh, most_bytes=100), dtype=jnp.uint8) == "compiled"
    assert not kept(fresh)


def test_a_full_disk_costs_a_log_line_and_no_start(
    files: ProgramFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_files.os, "rename", full)
    assert made(files) == "compiled"
    assert made(files) == "compiled"
    assert len([m for m in caplog.messages if "No space left" in m]) == 1


def test_without_files_nothing_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "environment", None)
    assert made(None) == "compiled"
