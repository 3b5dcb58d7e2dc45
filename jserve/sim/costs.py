"""What a step costs: from a table that ``jserve bench steps`` measured, or from a GPU's roofline.

Owns the prices and the device's limits. Must not know plans, schedulers or clocks. ``n_context`` is
the mean number of KV tokens that the rows of a step read.

A table has one measured step per bucket and context. A step takes the cheapest bucket that holds
it, as the runner does, and a straight line between the contexts; the bucket is priced as if full.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jserve.config import CacheOptions
from jserve.errors import ConfigError
from jserve.ports import StepCosts, StepTime

FORMAT = "jserve-steps-1"
MAX_PREFILL_ROWS = 8
"""Prefill rows of one step, as in ``jserve.runner.runner``."""


class TableFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of ``jserve bench steps``."""

    format: str
    about: dict[str, Any]
    """Model, machine, versions and options, for a reader."""
    host_seconds: float
    """What a step costs the host when nothing is hidden behind the device."""
    n_slots: int
    n_pages: int
    page_size: int
    max_model_len: int
    window: int = 0
    """``RunnerLimits.window``."""
    steps: tuple[StepTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A simulated device: its prices and what fits."""

    name: str
    costs: StepCosts
    n_pages: int
    max_model_len: int
    host_s: float = 0.0
    window: int = 0
    """``RunnerLimits.window`` of the model."""


class Table:
    """``ports.StepCosts`` over measured steps.

    Raises:
        ConfigError: there is nothing in it, or a time is not positive.
    """

    def __init__(self, steps: Iterable[StepTime], name: str = "step table") -> None:
        self.name = name
        self._lines: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for step in steps:
            if not step.seconds > 0 or min(step.n_decode, step.n_prefill, step.n_context) < 0:
                raise ConfigError(f"{name}: {step} makes no sense", field="costs")
            line = self._lines.setdefault((step.n_decode, step.n_prefill), [])
            bisect.insort(line, (step.n_context, step.seconds))
        if not self._lines:
            raise ConfigError(f"{name}: no steps", field="costs")
        self._buckets = sorted(self._lines, key=lambda b: (b[0] + b[1], b[0]))
        self._chosen: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        """Raises ConfigError for a step that no bucket holds."""
        line = self._chosen.get((n_decode, n_prefill))
        if line is None:
            line = self._chosen[n_decode, n_prefill] = self._choose(n_decode, n_prefill)
        return _interpolated(line, n_context)

    def _choose(self, n_decode: int, n_prefill: int) -> list[tuple[int, float]]:
        for bucket in self._buckets:
            if bucket[0] >= n_decode and bucket[1] >= n_prefill:
                return self._lines[bucket]
        raise ConfigError(
            f"{self.name} has no step of {n_decode} decode rows and {n_prefill} prefill tokens;"
            " measure with larger limits or lower max_num_seqs and max_num_batched_tokens",
            field="costs",
        )


def _interpolated(line: list[tuple[int, float]], n_context: int) -> float:
    """On the straight lines between the points; beyond the last one, on its rising continuation."""
    if len(line) == 1 or n_context <= line[0][0]:
        return line[0][1]
    at = min(bisect.bisect_left(line, (n_context, 0.0)), len(line) - 1)
    (x0, y0), (x1, y1) = line[at - 1], line[at]
    slope = (y1 - y0) / (x1 - x0)
    return (
        y0 + slope * (n_context - x0)
        if n_context <= x1
        else y1 + max(0.0, slope) * (n_context - x1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What one GPU reaches. ``reached`` scales bandwidth and flops to what engines get of them."""

    name: str
    bytes_per_s: float
    flops: float
    memory: float
    """Bytes a serving process can use."""
    reached: float
    step_s: float
    """Seconds of a step beside reading and multiplying: launch, norms, sampling."""


GPUS = {
    "h200": Gpu(
        name="NVIDIA H200",
        bytes_per_s=4.3e12,
        flops=780e12,
        memory=135e9,
        reached=0.7,
        step_s=3e-4,
    )
}
"""Measured copy bandwidth and bf16 matrix rate of one H200; serving engines publish 50 to 90 % of
that roofline for 8B models on it, hence ``reached``. ``step_s`` is a guess."""
GPU_HOST_S = 3e-4
"""Host seconds per step assumed beside a GPU (plan, pack and commit at 256 rows)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder, from its config.json."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    context: int
    tied: bool
    itemsize: int
    window: int = 0
    """Tokens that every layer sees; 0: all."""

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> Shape:
        """Raises ConfigError naming the key that is missing or no positive integer."""
        heads = _key(config, "num_attention_heads", name)
        hidden = _key(config, "hidden_size", name)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return cls(
            layers=_key(config, "num_hidden_layers", name),
            hidden=hidden,
            ffn=_key(config, "intermediate_size", name),
            heads=heads,
            kv_heads=_key(config, "num_key_value_heads", name, heads),
            head=_key(config, "head_dim", name, hidden // heads),
            vocab=_key(config, "vocab_size", name),
            context=_key(config, "max_position_embeddings", name),
            tied=bool(config.get("tie_word_embeddings", False)),
            itemsize=4 if dtype == "float32" else 2,
            window=_window(config, name),
        )

    @property
    def body(self) -> int:
        """Parameters of all layers."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def unembed(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token leaves in the KV pool."""
        return 2 * self.layers * self.kv_heads * self.head


MODEL = "llama-3.1-8b"
SHAPES = {
    MODEL: Shape(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        head=128,
        vocab=128256,
        context=131072,
        tied=False,
        itemsize=2,
    )
}
"""Shapes that need no config.json."""


def _window(config: Mapping[str, Any], name: str) -> int:
    """Mistral alone has a window in every layer; null is none."""
    if config.get("model_type") != "mistral" or config.get("sliding_window", 0) is None:
        return 0
    return _key(config, "sliding_window", name, 4096)


def _key(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {key} must be a positive integer, not {value!r}", field=key)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """``ports.StepCosts`` of a decoder on one GPU: the slower of memory and arithmetic.

    Memory: the weights once, each row's KV once, the new tokens' KV once. Arithmetic: two flops per
    weight and token, the unembedding once per row, four flops per query head, head dimension and
    visible token. Prefill counts as one row for both.
    """

    shape: Shape
    gpu: Gpu
    kv_itemsize: int

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        shape, gpu = self.shape, self.gpu
        n_context = min(n_context, shape.window or n_context)
        rows, tokens = n_decode + (n_prefill > 0), n_decode + n_prefill
        weights = shape.itemsize * (shape.body + shape.unembed)
        kv = self.kv_itemsize * shape.kv_numbers * (rows * n_context + tokens)
        attention = 4 * shape.layers * shape.heads * shape.head * tokens * n_context
        flops = 2 * shape.body * tokens + 2 * shape.unembed * rows + attention
        slower = max((weights + kv) / gpu.bytes_per_s, flops / gpu.flops)
        return slower / gpu.reached + gpu.step_s

    def n_pages(self, options: CacheOptions) -> int:
        """Pages that fit, as the cache options say.

        Raises:
            ConfigError: the weights leave no room.
        """
        if options.n_pages:
            return options.n_pages
        shape = self.shape
        stored = shape.itemsize * (shape.body + shape.unembed * (1 if shape.tied else 2))
        room = self.gpu.memory * options.memory_utilization - stored
        if options.kv_memory_gb:
            room = options.kv_memory_gb * 2**30
        n = int(room // (self.kv_itemsize * shape.kv_numbers * options.page_size))
        if n < 2:
            raise ConfigError(
                f"{self.gpu.name}: the weights leave no room for KV", field="memory_utilization"
            )
        return n


def from_table(path: Path, options: CacheOptions) -> Device:
    """The device that a file of ``jserve bench steps`` describes.

    Raises:
        ConfigError: the file, or an option that only sizes memory and has no meaning here.
    """
    file = read_table(path, "costs")
    for name in ("memory_utilization", "kv_memory_gb", "kv_dtype"):
        if getattr(options, name) != getattr(CacheOptions(), name):
            raise ConfigError(
                f"{name} has no meaning with a measured table; set n_pages", field=name
            )
    in_tokens = (file.n_pages - 1) * file.page_size
    return Device(
        name=str(file.about.get("model", path.name)),
        costs=Table(file.steps, str(path)),
        n_pages=options.n_pages or 1 + in_tokens // options.page_size,
        max_model_len=file.max_model_len,
        window=file.window,
        host_s=file.host_seconds,
    )


def read_table(path: Path, field: str) -> TableFile:
    """A file of ``jserve bench steps``.

    Raises:
        ConfigError: it is none; ``field`` is the option that named it.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TableFile)
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{field} {path}: {e}", field=field) from None
    if file.format != FORMAT:
        raise ConfigError(f"{field} {path}: format {file.format!r}, not {FORMAT}", field=field)
    return file


def from_roofline(model: str, gpu: str, options: CacheOptions) -> Device:
    """One ``gpu`` serving ``model``: a name of ``SHAPES``, a config.json or its directory.

    Raises:
        ConfigError: an unknown GPU, or a config.json that is not one of a plain decoder.
    """
    if gpu not in GPUS:
        raise ConfigError(f"no roofline for {gpu!r}, only {', '.join(GPUS)}", field="gpu")
    shape = SHAPES.get(model) or _shape(Path(model))
    kv_itemsize = {"auto": shape.itemsize, "float32": 4}.get(options.kv_dtype, 2)
    costs = Roofline(shape=shape, gpu=GPUS[gpu], kv_itemsize=kv_itemsize)
    return Device(
        name=f"{model} on one {GPUS[gpu].name} (roofline)",
        costs=costs,
        n_pages=costs.n_pages(options),
        max_model_len=shape.context,
        window=shape.window,
        host_s=GPU_HOST_S,
    )


def _shape(path: Path) -> Shape:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"roofline {path}: {e}", field="roofline") from None
    return Shape.of(config, str(path))


def ladder(costs: StepCosts, *, rows: int, tokens: int, context: int) -> tuple[StepTime, ...]:
    """The step times that the scheduler is told before the first step: a rung per doubling."""
    decode = [0, *_doubling(2, rows)]
    return tuple(
        StepTime(n_decode=d, n_prefill=p, n_context=c, seconds=costs.seconds(d, p, c))
        for d in decode
        for p in [0, *_doubling(32, tokens)]
        for c in _doubling(256, context)
        if d + p
    )


def _doubling(first: int, last: int) -> list[int]:
    top = max(0, math.ceil(math.log2(last / first)) if last > first else 0)
    return [first << i for i in range(top)] + [last]
