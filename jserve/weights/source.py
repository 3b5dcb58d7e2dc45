"""Resolves ``--model`` and ``--load-format`` to a directory and its format.

It owns telling local directories, Orbax directories and hub names apart, and reading the JSON files beside the
weights. Opens no weights, imports neither jax nor anything out of a model directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.errors import BadRequest, ConfigError, WeightsError
from jserve.gguf import header
from jserve.gguf.config import config_of
from jserve.gguf.header import is_gguf
from jserve.model.hf_text import text_part
from jserve.sampling import SamplingParams
from jserve.weights import hf
from jserve.weights.hub import download
from jserve.weights.quant import stated
from jserve.weights.safetensors import MAX_HEADER_BYTES

FORMATS = ("auto", "safetensors", "orbax", "dummy")
"""Values of ``--load-format``; a GGUF file needs none."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WHOLE, PAGES, PAGE = 1 << 20, 64, 4096
"""``Source.fingerprint`` hashes so many first bytes of a file, and so many evenly spaced pages of so many bytes."""
ORBAX_DIR = "params"
ORBAX_MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model found: where its files are, what its weights are, and its parsed JSON."""

    name: str
    """Last part of the directory or hub name: the default model name in the API."""
    directory: Path
    """Holds config.json and the tokenizer files; or the GGUF file, whose header has what they say."""
    format: str
    """safetensors, orbax, gguf or dummy."""
    weights: Path
    """Directory of the weights (the Orbax directory, else ``directory``), or the GGUF file."""
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    """generation_config.json; {} if missing or broken."""

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The sampling defaults of generation_config.json; values that are no valid setting are left out."""
        found: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            with contextlib.suppress(BadRequest):
                if self.generation.get(name) is not None:
                    SamplingParams(**{name: self.generation[name]})
                    found[name] = self.generation[name]
        if self.generation.get("do_sample") is False:
            found["temperature"] = 0.0
        return found

    @property
    def stamp(self) -> str:
        """16 hex digits of the names, sizes and times of all files: other ones are other weights. Dummy weights
        have none."""
        digest = hashlib.blake2b(digest_size=8)
        files = [self.weights] if self.weights.is_file() else sorted(self.weights.rglob("*"))
        for path in files if self.format != "dummy" else ():
            if path.is_file():
                about = path.stat()
                digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    @property
    def fingerprint(self) -> str:
        """32 hex digits of what the weights and their config are, wherever the files lie and however old they are:
        other ones are other weights. Of a large file its size, header and ``PAGES`` pages count. Empty for dummy
        weights.

        Raises:
            WeightsError: a file cannot be read.
        """
        if self.format == "dummy":
            return ""
        digest = hashlib.blake2b(
            json.dumps(self.config, sort_keys=True, default=str).encode(), digest_size=16
        )
        for path in self._files():
            try:
                _add(digest, path)
            except OSError as error:
                raise WeightsError(f"{path}: {error.strerror}", field=str(path)) from None
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        if self.weights.is_file():
            return [self.weights]
        found = (
            self.weights.glob("*.safetensors")
            if self.format == "safetensors"
            else self.weights.rglob("*")
        )
        return sorted(path for path in found if path.is_file())

    @property
    def penalises(self) -> bool:
        """True when requests that say nothing of penalties have one."""
        return SamplingParams(**self.sampling_defaults).penalised


def _add(digest: Any, path: Path) -> None:
    """Add a file of weights: its name and size, and the whole of it, or what stands for it."""
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        start = file.read(WHOLE)
        digest.update(start)
        if size <= WHOLE:
            return
        if path.suffix == ".safetensors":
            file.seek(WHOLE)
            header = int.from_bytes(start[:8], "little")
            digest.update(file.read(max(0, min(header, MAX_HEADER_BYTES) + 8 - WHOLE)))
        for i in range(PAGES):
            file.seek(i * (size - PAGE) // (PAGES - 1))
            digest.update(file.read(PAGE))


def resolve(model: str, revision: str = "", load_format: str = "auto") -> Source:
    """Find a model: a local directory, a GGUF file, a config.json (dummy weights only), or a hub name
    ``owner/name``.

    Raises:
        ConfigError: nothing there, no network, no config.json; ``field`` is the option or the file.
        WeightsError: the directory has no weights of that format (e.g. only pickled ones).
    """
    if load_format not in FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(FORMATS)}", field="load_format")
    if not model:
        raise ConfigError("model is empty", field="model")
    if is_gguf(model) and Path(model).is_file():
        return _of_gguf(Path(model).absolute(), load_format)
    directory = _directory(model, revision, dummy=load_format == "dummy")
    found = _format(directory, load_format)
    return Source(
        name=Path(model).name if HUB_NAME.fullmatch(model) else directory.name,
        directory=directory,
        format=found,
        weights=(orbax_root(directory) or directory) if found == "orbax" else directory,
        config=stated.with_quantisation(directory, text_part(hf.read_config(directory))),
        generation=hf.read_generation_config(directory),
    )


def _of_gguf(path: Path, load_format: str) -> Source:
    if load_format not in ("auto", "dummy"):
        why = f"{path.name} is a GGUF file, not {load_format}"
        raise ConfigError(f"load_format: {why}", field="load_format")
    return Source(
        name=path.stem,
        directory=path,
        format="gguf" if load_format == "auto" else "dummy",
        weights=path,
        config=config_of(header.read(path)),
        generation={},
    )


def orbax_root(directory: Path) -> Path | None:
    """The Orbax checkpoint of a directory: its ``params`` folder or itself; None if neither."""
    for root in (directory / ORBAX_DIR, directory):
        if any((root / mark).exists() for mark in ORBAX_MARKS):
            return root
    return None


def _directory(model: str, revision: str, *, dummy: bool) -> Path:
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)[:100]
        raise ConfigError(f"model {model[:80]!r} is no path: {reason}", field="model") from None
    if is_dir:
        return path.absolute()
    if is_file and dummy and path.name == "config.json":
        return path.absolute().parent
    if is_file:
        why = "is a file; give the directory it is in, or a file.gguf"
        raise ConfigError(f"model {model!r} {why}", field="model")
    if not HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"model {model[:200]!r}: no such directory (and no hub name, which is owner/name)",
            field="model",
        )
    return download(model, revision, weights=not dummy)


def _format(directory: Path, asked: str) -> str:
    if asked == "dummy":
        return asked
    if asked in ("auto", "safetensors") and hf.has_safetensors(directory):
        return "safetensors"
    if asked in ("auto", "orbax") and orbax_root(directory) is not None:
        return "orbax"
    if asked == "orbax":
        raise WeightsError(
            f"{directory}: no Orbax checkpoint (run jserve convert)", field=str(directory)
        )
    if not (directory / "config.json").exists():
        hf.read_config(directory)
    raise hf.no_weights(directory)
