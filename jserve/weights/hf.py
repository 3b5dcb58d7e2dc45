"""Reads a Hugging Face model directory: JSON files and safetensors shards.

It owns which file holds which tensor (single file, sharded index, or shards without an index) and reading
config.json and generation_config.json. Nothing in the directory is ever imported or unpickled: ``auto_map`` and
``*.py`` files are ignored, ``*.bin`` and the like are refused with advice.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jserve.errors import ConfigError, WeightsError
from jserve.weights.safetensors import (
    DuplicateKey,
    SafetensorsFile,
    TensorInfo,
    broken,
    unique_keys,
)

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_JSON_BYTES = 64 << 20

Kinds = tuple[str, ...]
"""Names of numpy dtypes."""

FLOATS: Kinds = ("bfloat16", "float16", "float32", "float64")
INTEGERS: Kinds = ("int32", "int64")
BYTES: Kinds = ("uint8",)

PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""Of the tensors of one model, by who wrote the file; a shorter one comes before those that begin with it."""

BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Endings of tensors that old exporters wrote and no model needs."""


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory.

    Raises:
        ConfigError: missing, not JSON, or not an object; ``field`` is the file.
    """
    return read_json(directory / "config.json")


def read_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json, or {} if there is none or it is broken (which is logged)."""
    path = directory / "generation_config.json"
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except ConfigError as error:
        log.warning("ignored: %s", error.message)
        return {}


def read_json(path: Path, hook: Any = None) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ConfigError: missing, too large, not UTF-8, not JSON, not an object. ``DuplicateKey``
        passes from ``hook``.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise _unusable(path, f"larger than {MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=hook)
    except (ConfigError, DuplicateKey):
        raise
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise _unusable(path, "not a JSON object")
    return value


def dtype_name(config: Mapping[str, Any]) -> str:
    """The dtype config.json states: bfloat16, float16 or float32 (none stated: float32).

    Raises:
        ConfigError: another dtype.
    """
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"config.json: dtype {name[:40]!r} is not supported", field="dtype")
    return name


class TensorFile(Protocol):
    """A file of tensors: its header, and views of what is in it."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """Tensor ``name``, read-only."""
        ...

    def drop_pages(self) -> None:
        """Give back the mapped pages read so far."""
        ...


class Tensors:
    """All tensors of a directory by name, read lazily; ``get`` checks and remembers what was used.

    Raises:
        WeightsError: an index or shard is missing or broken; ``field`` names the file (and tensor).
    """

    __slots__ = ("_distinct", "_files", "_used", "directory")

    def __init__(self, directory: Path, file: TensorFile | None = None) -> None:
        """``file``: the one that holds them all, where it is no safetensors file."""
        self.directory = directory
        self._files: Mapping[str, TensorFile] = (
            _files_by_tensor(directory) if file is None else dict.fromkeys(file.tensors, file)
        )
        self._distinct = list(dict.fromkeys(self._files.values()))
        self._used: set[str] = set()

    def get(self, name: str, shape: tuple[int, ...], kinds: Kinds = FLOATS) -> np.ndarray:
        """Tensor ``name`` as a view of the mapped file. A checkpoint that lacks the ``model.``
        prefix, or has the one of a text model in a larger one, is read too.

        Raises:
            WeightsError: as ``check``.
        """
        found = self.check(name, shape, kinds)
        self._used.add(found)
        return self._files[found].read(found).reshape(shape)

    def check(self, name: str, shape: tuple[int, ...], kinds: Kinds = FLOATS) -> str:
        """Refuse a tensor that ``get`` cannot give, by the header alone. Returns its name in the files.

        Raises:
            WeightsError: no such tensor, another shape, or a dtype that is none of ``kinds``.
        """
        found = self._resolve(name)
        file = self._files[found]
        info = file.tensors[found]
        alike = (
            math.prod(info.shape) == math.prod(shape) == 1
        )  # some write a number as [], some as [1]
        if info.shape != shape and not alike:
            raise broken(file.path, f"shape {info.shape}, the config asks for {shape}", found)
        if info.dtype.name not in kinds:
            raise broken(file.path, f"dtype {info.dtype}, must be {_either(kinds)}", found)
        return found

    def has(self, name: str) -> bool:
        """True if there is a tensor ``name``."""
        return self._found(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of tensor ``name``, as its file states it."""
        found = self._resolve(name)
        return self._files[found].tensors[found].shape

    def dtype(self, name: str) -> str:
        """Of tensor ``name``, as its file states it."""
        found = self._resolve(name)
        return self._files[found].tensors[found].dtype.name

    def path(self, name: str) -> Path:
        """The file that holds tensor ``name``."""
        return self._files[self._resolve(name)].path

    def _resolve(self, name: str) -> str:
        found = self._found(name)
        if found is not None:
            return found
        places = sorted({f.path.name for f in self._files.values()})
        where = places[0] if len(places) == 1 else INDEX
        raise broken(self.directory / where, f"missing ({self._instead(name)})", name)

    def _instead(self, name: str) -> str:
        """The tensors there are of the module of tensor ``name``, or how many there are at all."""
        start = f"{_bare(name.rpartition('.')[0])}."
        found = [bare for n in self._files if (bare := _bare(n)).startswith(start)]
        endings = sorted(n.removeprefix(start) for n in found)[:6]
        return f"there is {', '.join(endings)}" if endings else f"the file has {len(self._files)}"

    def _found(self, name: str) -> str | None:
        """The name in the files, which may have a prefix more or less."""
        if name in self._files:
            return name
        bare = _bare(name)
        candidates = (f"{prefix}{bare}" for prefix in PREFIXES)
        return next((x for x in candidates if x in self._files), None)

    def drop_pages(self) -> None:
        """Give back the mapped pages read so far."""
        for file in self._distinct:
            file.drop_pages()

    def names(self) -> Collection[str]:
        """Of all tensors, as they are in the files."""
        return self._files.keys()

    def used(self) -> Collection[str]:
        """The tensors that were asked for, as they are in the files."""
        return self._used

    def unused(self, ignore: Iterable[str] = ()) -> list[str]:
        """The tensors that nothing asked for, except known buffers and ``ignore``."""
        skip = self._used | set(ignore)
        return sorted(n for n in self._files if n not in skip and not n.endswith(BUFFERS))

    def refuse_unused(self, ignore: Iterable[str] = ()) -> None:
        """Raise the WeightsError of the first tensor that nothing asked for, if there is one."""
        for name in self.unused(ignore)[:1]:
            raise broken(self.path(name), "this format has no such tensor", name)

    def warn_unused(self, ignore: Iterable[str] = ()) -> list[str]:
        """Log and return the tensors that nothing asked for."""
        extra = self.unused(ignore)
        if extra:
            shown = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
            log.warning("%s: %d unused tensors: %s", self.directory, len(extra), shown)
        return extra


def _bare(name: str) -> str:
    """``name`` without its prefix."""
    return next(name.removeprefix(p) for p in PREFIXES[::-1] if name.startswith(p))


def _either(kinds: Kinds) -> str:
    return " or ".join([", ".join(kinds[:-1]), kinds[-1]] if kinds[1:] else kinds)


def has_safetensors(directory: Path) -> bool:
    return (directory / INDEX).exists() or any(directory.glob("*.safetensors"))


def no_weights(directory: Path) -> WeightsError:
    """The error of a directory without weights that can be read, with advice if it has pickled ones."""
    pickles = sorted(p.name for pattern in PICKLES for p in directory.glob(pattern))
    if pickles:
        why = (
            f"only pickled weights ({pickles[0]}); they are never loaded because they can run "
            "code. Save them as safetensors, e.g. model.save_pretrained(dir) with transformers"
        )
        return WeightsError(f"{directory}: {why}", field=str(directory / pickles[0]))
    return WeightsError(f"{directory}: no *.safetensors file", field=str(directory / SINGLE))


def _files_by_tensor(directory: Path) -> dict[str, SafetensorsFile]:
    if (directory / SINGLE).exists():
        return _union([directory / SINGLE])
    if (directory / INDEX).exists():
        return _indexed(directory)
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise no_weights(directory)
    return _union(paths)


def _union(paths: list[Path]) -> dict[str, SafetensorsFile]:
    files: dict[str, SafetensorsFile] = {}
    for path in paths:
        file = SafetensorsFile(path)
        for name in file.tensors:
            if name in files:
                raise broken(path, f"is also in {files[name].path.name}", name)
            files[name] = file
    return files


def _indexed(directory: Path) -> dict[str, SafetensorsFile]:
    index = directory / INDEX
    weight_map = _weight_map(index)
    shards = {name: _shard(index, name) for name in sorted(set(weight_map.values()))}
    _check_distinct(index, shards)
    files = {name: SafetensorsFile(path) for name, path in shards.items()}
    for tensor, shard in weight_map.items():
        if tensor not in files[shard].tensors:
            raise broken(files[shard].path, f"missing, though {INDEX} puts it there", tensor)
    for file in files.values():
        stray = [name for name in file.tensors if name not in weight_map]
        if stray:
            log.warning("%s: %d tensors are not in the index", file.path, len(stray))
    return {tensor: files[shard] for tensor, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index, unique_keys).get("weight_map")
    except DuplicateKey as error:
        raise broken(index, "listed twice", error.key) from None
    except ConfigError as error:
        raise WeightsError(error.message, field=str(index)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise broken(index, "has no weight_map object")
    seen: set[str] = set()
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise broken(index, "its shard is not a file name", tensor)
        if shard in seen:
            continue
        seen.add(shard)
        if Path(shard).name != shard or "\\" in shard or "\0" in shard or shard in (".", ".."):
            raise broken(index, f"shard {shard[:80]!r} is not a plain file name", tensor)
        if not shard.endswith(".safetensors"):
            raise broken(index, f"shard {shard[:80]!r} is not a safetensors file", tensor)
    return weight_map


def _shard(index: Path, name: str) -> Path:
    path = index.parent / name
    if not path.exists():
        raise broken(path, f"shard listed in {INDEX} is missing")
    return path


def _check_distinct(index: Path, shards: Mapping[str, Path]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for name, path in shards.items():
        info = path.stat()
        other = seen.setdefault((info.st_dev, info.st_ino), name)
        if other != name:
            raise broken(index, f"shard {name} is listed twice: it is the same file as {other}")


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path.name}: {why} ({path})", field=str(path))
