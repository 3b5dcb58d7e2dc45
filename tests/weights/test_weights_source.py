"""From ``--model`` to a directory: local, Orbax, hub; and no jax on the way."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jserve.errors import ConfigError, WeightsError
from jserve.weights.source import resolve
from tests.weights.weights_kit import LLAMA, Model

ROOT = Path(__file__).parents[2]
# The HTTP library that huggingface_hub stands on: httpx for 1.x, httpx2 for 2.x.
httpx = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
NAME = "owner/tiny-model"


def test_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tmp_path / "some-model", LLAMA).single()
    source = resolve(str(model.path))
    assert (source.name, source.format) == ("some-model", "safetensors")
    assert source.directory == source.weights == model.path
    assert source.config == LLAMA
    monkeypatch.chdir(tmp_path)
    assert resolve("some-model").directory == model.path
    assert resolve("./some-model/").name == "some-model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/some-model").directory == model.path


def changed(path: Path, at: int) -> None:
    """Another byte there, and the same times."""
    about, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


LARGE = LLAMA | {"vocab_size": 1 << 15}
"""Two matrices of 2 MiB."""


def test_a_fingerprint_is_of_what_the_weights_are(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", LARGE).single()
    weights, found = model.path / "model.safetensors", resolve(str(model.path))
    want, size = found.fingerprint, weights.stat().st_size
    assert size > 1 << 21
    copy = Path(shutil.copytree(model.path, tmp_path / "elsewhere"))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    (copy / "README.md").write_text("of a model")
    assert resolve(str(copy)).fingerprint == want
    assert resolve(str(copy)).stamp != found.stamp
    pages = [i * (size - 4096) // 63 for i in range(64)]
    for at in (0, 9, 100_000, pages[40], pages[63] + 4095):
        changed(copy / weights.name, at)
        assert resolve(str(copy)).fingerprint != want
        changed(copy / weights.name, at)
    assert resolve(str(copy)).fingerprint == want
    weights.rename(weights.with_name("other.safetensors"))
    assert found.fingerprint != want
    model.single()
    weights.with_name("other.safetensors").unlink()
    model.write_json("config.json", LARGE | {"rope_theta": 7.0})
    assert resolve(str(model.path)).fingerprint != want


def test_a_fingerprint_has_the_whole_header_of_a_large_file(tmp_path: Path) -> None:
    def long(header: dict[str, Any]) -> None:
        header["__metadata__"] = {str(i): "x" * 50 for i in range(60_000)}

    model = Model(tmp_path, LARGE).single(long)
    weights = model.path / "model.safetensors"
    header = int.from_bytes(weights.read_bytes()[:8], "little")
    size, want = weights.stat().st_size, resolve(str(model.path)).fingerprint
    pages = [i * (size - 4096) // 63 for i in range(64)]
    at = next(b for b in range(2 << 20, header) if not any(p <= b < p + 4096 for p in pages))
    changed(weights, at)
    assert resolve(str(model.path)).fingerprint != want


def test_dummy_weights_have_no_fingerprint(tmp_path: Path) -> None:
    model = Model(tmp_path, LLAMA).single()
    assert resolve(str(model.path), load_format="dummy").fingerprint == ""


def test_format_may_be_asked_for(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", LLAMA)
    assert resolve(str(model.path), load_format="dummy").format == "dummy"
    assert resolve(str(model.path / "config.json"), load_format="dummy").name == "m"
    model.single()
    assert resolve(str(model.path), load_format="dummy").format == "dummy"
    assert resolve(str(model.path), load_format="safetensors").format == "safetensors"
    with pytest.raises(WeightsError, match="jserve convert"):
        resolve(str(model.path), load_format="orbax")
    with pytest.raises(ConfigError, match="load_format"):
        resolve(str(model.path), load_format="gguf")


@pytest.mark.parametrize(
    "model", ["", "nowhere", "./nowhere", "/no/such/dir", "a/b/c", "a\0b", "x" * 5000, "../..//x y"]
)
def test_no_such_path_is_one_clear_line(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(model)
    assert caught.value.field == "model"
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_file_instead_of_a_directory(tmp_path: Path) -> None:
    Model(tmp_path / "m", LLAMA).single()
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ConfigError, match="is a file") as caught:
            resolve(str(tmp_path / "m" / name))
        assert caught.value.field == "model"


def test_imports_no_jax() -> None:
    code = (
        "import sys, jserve.weights.source, jserve.weights.hf, jserve.weights.safetensors;"
        "bad = {'jax', 'flax', 'orbax', 'transformers', 'torch'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- hub -----------------------------------------------------------------------------------------


class Hub:
    """Stands in for huggingface_hub: what is cached, what is online, and what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached: Path | None = None
        self.online: Path | Exception | None = None
        self.calls: list[dict[str, Any]] = []
        self.probes = 0
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "get_session", lambda: self)

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.calls.append({"name": name, **options})
        if options["local_files_only"]:
            if self.cached is None:
                raise LocalEntryNotFoundError("not cached\nsecond line")
            return str(self.cached)
        if isinstance(self.online, Exception):
            raise self.online
        return str(self.online)

    def head(self, url: str, timeout: float) -> None:
        self.probes += 1
        if self.online is None:
            raise httpx.ConnectError("name resolution failed\nsecond line")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def refused(model: str = NAME, **options: Any) -> ConfigError:
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        resolve(model, **options)
    assert time.monotonic() - start < 5
    assert "\n" not in caught.value.message
    assert model in caught.value.message
    return caught.value


def test_cache_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    hub.cached = Model(tmp_path / "abc123", LLAMA).single().path
    source = resolve(NAME, "v1")
    assert source.name == "tiny-model"
    assert source.directory == hub.cached
    assert hub.probes == 0
    (call,) = hub.calls
    assert call["revision"] == "v1"
    assert not {"*.py", "*.bin", "*"} & set(call["allow_patterns"])


def test_downloads_what_is_not_cached(hub: Hub, tmp_path: Path) -> None:
    hub.online = Model(tmp_path / "abc123", LLAMA).single().path
    assert resolve(NAME).directory == hub.online
    assert [c["local_files_only"] for c in hub.calls] == [True, False]
    assert hub.calls[1]["revision"] is None
    assert "*.safetensors" in hub.calls[1]["allow_patterns"]


def test_half_a_cache_is_completed(hub: Hub, tmp_path: Path) -> None:
    hub.cached = Model(tmp_path / "half", LLAMA).path
    hub.online = Model(tmp_path / "full", LLAMA).single().path
    assert resolve(NAME).directory == hub.online
    assert resolve(NAME, load_format="dummy").directory == hub.cached
    assert "*.safetensors" not in hub.calls[-1]["allow_patterns"]


def test_no_network_is_one_quick_line(hub: Hub) -> None:
    error = refused()
    assert error.field == "model"
    assert "cannot be reached (ConnectError)" in error.message
    assert "not in the local cache" in error.message
    assert len(hub.calls) == 1


def test_offline_switch_is_respected(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused().message
    assert hub.probes == 0


def answer(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "field", "says"),
    [
        (RepositoryNotFoundError("404\nmore", response=answer(404)), "model", "no such model"),
        (GatedRepoError("403\nmore", response=answer(403)), "model", "gated"),
        (RevisionNotFoundError("404\nmore", response=answer(404)), "revision", "no revision 'v9'"),
        (OSError(28, "No space left on device"), "model", "No space left"),
        (httpx.ReadTimeout("slow\nmore"), "model", "download failed: ReadTimeout: slow"),
    ],
)
def test_hub_errors_are_one_line(hub: Hub, error: Exception, field: str, says: str) -> None:
    hub.online = error
    caught = refused(revision="v9")
    assert caught.field == field
    assert says in caught.message


def test_hub_model_without_safetensors(hub: Hub, tmp_path: Path) -> None:
    hub.online = Model(tmp_path / "abc", LLAMA).path
    with pytest.raises(WeightsError, match=r"no .*safetensors"):
        resolve(NAME)


def test_real_cache_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself on a hand-made cache: symlinks into blobs, a ref, no network asked for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "a" * 40
    root = tmp_path / "models--owner--tiny-model"
    model = Model(root / "blobs", LLAMA).single()
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for blob in list(model.path.iterdir()):
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    (root / "refs").mkdir()
    (root / "refs/main").write_text(commit)
    source = resolve(NAME)
    assert source.directory == snapshot
    assert source.config == json.loads((snapshot / "config.json").read_text())
    assert "not in the local cache" in refused("owner/other").message
    assert "not in the local cache" in refused(NAME, revision="v2").message


def test_unreachable_hub_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself against a closed port of this machine: quick, one line, nothing logged."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    assert "127.0.0.1:9 cannot be reached" in refused().message
