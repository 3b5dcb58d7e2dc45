"""Whether a library is found, and when it is not trusted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from jserve.errors import ConfigError
from jserve.model import native
from jserve.native import compile as build, library
from jserve.native.library import HANDLERS, LEVELS, Library, NoLibrary
from tests.native.conftest import built, level_of, level_of_processor


def test_the_level_is_what_the_system_says_of_the_processor(kernels):
    level = level_of(Path(kernels.handle._name))
    assert kernels.level == level
    assert kernels.levels() == LEVELS[: LEVELS.index(level) + 1]


@pytest.mark.slow
def test_a_compiler_too_old_for_tiles_gives_a_level_without_them(tmp_path):
    path = built(tmp_path, "-U__GNUC__", "-D__GNUC__=10", "-U__clang__")
    found = library.load(path).level
    assert found == level_of(path) == {"amx": "avx512f"}.get(level_of_processor(), found)


def test_every_handler_is_in_the_library(kernels):
    assert all(kernels.function(function) for function in HANDLERS.values())
    assert all(re.fullmatch(r"jserve\.\w+\.v\d+", name) for name in HANDLERS)


def test_what_is_missing_or_no_library_is_refused(tmp_path):
    with pytest.raises(NoLibrary, match="no library was built"):
        library.load(tmp_path / "none.so")
    other = tmp_path / "libjserve.so"
    other.write_bytes(b"\x7fELF and no more")
    with pytest.raises(NoLibrary, match="cannot be loaded"):
        library.load(other)


def test_a_library_of_other_sources_is_refused(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "source_hash", lambda: "0" * 16)
    with pytest.raises(NoLibrary, match="built from other sources"):
        library.load(Path(kernels.handle._name))


def test_the_hash_changes_with_the_sources(tmp_path, monkeypatch):
    before = build.source_hash()
    for name in build.SOURCES:
        shutil.copy(build.FOLDER / name, tmp_path)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.source_hash() == before
    with (tmp_path / "kernels.c").open("a") as f:
        f.write("\n")
    assert build.source_hash() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("a += b, c += d, e += f, g += h;", "a += b, c += d, e += f, g += f;"),
        ("by = 1.0f / s->total[r] + s->odd[r];", "by = 1.1f / s->total[r] + s->odd[r];"),
        ("s->low[r] = a->window ?", "s->low[r] = a->window > 32 ?"),
    ],
    ids=["products", "attention", "the window of attention"],
)
def test_kernels_that_give_wrong_results_are_refused(tmp_path, monkeypatch, line, wrong):
    for name in build.SOURCES:
        shutil.copy(build.FOLDER / name, tmp_path)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    source = tmp_path / "kernels.c"
    text = source.read_text()
    assert line in text
    source.write_text(text.replace(line, wrong))
    path = built(tmp_path)
    if Library(library.ctypes.CDLL(str(path)), LEVELS[0]).handle.jserve_level() == 0:
        pytest.skip("this processor has the level plain alone")
    with pytest.raises(NoLibrary, match=f"level {LEVELS[1]} give wrong results"):
        library.load(path)


def test_a_compiler_that_fails_is_one_line(tmp_path):
    out = tmp_path / "libjserve.so"
    with pytest.raises(build.NativeBuildError, match="cannot be run"):
        build.compile_library(out, [str(tmp_path / "no-such-cc")])
    with pytest.raises(build.NativeBuildError, match="false fails: ") as e:
        build.compile_library(out, ["false"])
    assert "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_on_windows_there_is_none_and_nothing_is_compiled(kernels, tmp_path, monkeypatch):
    path = Path(kernels.handle._name)
    monkeypatch.setattr(library.sys, "platform", "win32")
    with pytest.raises(NoLibrary, match="none for Windows"):
        library.load(path)
    with pytest.raises(build.NativeBuildError, match="none for Windows"):
        build.compile_library(tmp_path / "libjserve.so", ["gcc"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(native, "installed", lambda: library.load(path))
    assert native.chosen("auto", "cpu", "bfloat16") == ("", "there are none for Windows")


def without(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def none() -> Library:
        raise NoLibrary(reason)

    monkeypatch.setattr(native, "installed", none)


def test_auto_falls_back_with_the_reason_and_native_is_an_error(monkeypatch):
    without(monkeypatch, "no library was built")
    assert native.chosen("auto", "cpu", "bfloat16") == ("", "no library was built")
    assert native.chosen("xla", "cpu", "bfloat16") == ("", "asked for")
    with pytest.raises(ConfigError, match="kernels native: no library was built") as e:
        native.chosen("native", "cpu", "bfloat16")
    assert e.value.field == "kernels"


def test_what_they_do_not_multiply_is_refused_by_name(kernels):
    with pytest.raises(ConfigError, match="the weights are float32"):
        native.chosen("native", "cpu", "float32")
    with pytest.raises(ConfigError, match="the devices are cuda"):
        native.chosen("native", "cuda", "bfloat16")
    assert native.available("cpu", "bfloat16", level="plain") == (
        "",
        "level plain is slower than XLA",
    )


def test_a_level_can_be_forced_down(level):
    assert native.chosen("auto", "cpu", "bfloat16") == (level, "")
    lower = LEVELS[1]
    assert native.available("cpu", "bfloat16", level=lower) == (lower, "")
