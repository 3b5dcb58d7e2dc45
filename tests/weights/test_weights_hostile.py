"""Headers and configs of quantised checkpoints that anything was done to: our errors and nothing else, in bounded
memory."""

from __future__ import annotations

import json
import signal
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from jserve.errors import ConfigError, WeightsError
from jserve.model.families import family_for
from jserve.text.tokenizer import load_tokenizer
from jserve.weights.hf import Tensors
from jserve.weights.loader import tensors_of
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.quant.tensors import QuantisedTensors
from jserve.weights.source import resolve
from tests.weights.gguf_files import gguf
from tests.weights.test_weights_gguf import CONFIG as GGUF_CONFIG, MIXED, Written as Gguf
from tests.weights.test_weights_quant import CONFIG, FORMATS
from tests.weights.weights_kit import pack

OURS = (ConfigError, WeightsError)
CASES = sorted(FORMATS)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "group", "re:(a+)+$", "\x00", "gptq", "float", "Linear", "re:["])
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a JSON value."""
    found = [path] if path else []
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        found += places(value[key], (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    made = json.loads(json.dumps(value))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if new is DROPPED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return made


DROPPED = object()


class Small:
    """The tensors of one matrix in each format, so that a file costs little."""

    N, D = 16, 64
    STEM = "model.layers.0.mlp.down_proj"

    def __init__(self) -> None:
        self.made = {
            name: FORMATS[name].pack(np.random.default_rng(0), self.N, self.D)[0] for name in CASES
        }

    def write(self, path: Path, tensors: dict[str, np.ndarray]) -> None:
        named = {f"{self.STEM}.{ending}": x for ending, x in tensors.items()}
        (path / "model.safetensors").write_bytes(pack(named))

    def read(self, path: Path, config: Any) -> None:
        """What a load does with the matrix, by headers and then by values."""
        scheme = scheme_of({"quantization_config": config}, jnp.float32)
        if scheme is None:
            return
        form = scheme.form_of(self.STEM, self.D)
        read = QuantisedTensors(Tensors(path), scheme)
        for ending in ("", ":q", ":scale"):
            groups = form.groups(self.D) if form is not None and ending == ":scale" else self.D
            read.get(f"{self.STEM}.weight{ending}", (self.N, groups))


SMALL = Small()


MIB = 1 << 20
"""Sixteen times what a matrix of ``Small`` has in float32: no size that a file only states is allocated."""


Ends = Counter[str]
"""How many inputs "ran" to their end, and how many were "refused"."""


def survives(do: Any, most: int = 0) -> str:
    """Runs to the end or to one of our errors, which has one line and names a field; says which. In at most ``most``
    bytes of memory, where that is not 0."""
    error = None
    if most:
        tracemalloc.start()
    try:
        do()
    except OURS as caught:
        error = caught
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert error is None or (error.field and "\n" not in error.message)
    assert not most or peak < most, peak
    return "refused" if error else "ran"


def fuzz_configs(path: Path, n: int) -> Ends:
    ends = Ends()

    @settings(max_examples=n, **QUIET)  # type: ignore[arg-type]
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(CASES))
        config = json.loads(json.dumps(dict(FORMATS[name].config)))
        for _ in range(data.draw(st.integers(1, 2))):
            at = data.draw(st.sampled_from(places(config) or [("quant_method",)]))
            config = replaced(config, at, data.draw(st.just(DROPPED) | JSON))
        SMALL.write(path, SMALL.made[name])
        ends[survives(lambda: SMALL.read(path, config), MIB)] += 1

        def specs() -> None:
            family = family_for(CONFIG)
            given = CONFIG | {"quantization_config": config}
            made = quantised(family, scheme_of(given, jnp.float32))
            made.specs(family.arch(given), 2)

        survives(specs)

    run()
    return ends


PIECES = st.sampled_from(
    [
        *(".*", ".+", "a?", r"\w*", "[a-m]*", "(aa|ab|.b)", "(a|)", "a{1,30}", ".*?", "a{9}", "x"),
        *("!", "|", r"\.", "$", "*", "+", "(", ")", "{", "?", "[", "re:", ".*.*.*.*"),
    ]
)
SLOW_NAMES = ("a" * 60, "ab" * 30, "model.layers.11.self_attn.q_proj")
SECONDS = 2.0


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails after that much time of the processor, in the midst of a match, too."""

    def late(*_: Any) -> None:
        raise AssertionError(f"more than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def with_patterns(patterns: list[str]) -> list[dict[str, Any]]:
    """Configs that have these."""
    gptq, of_gptq = FORMATS["gptq 4 bits"].config, FORMATS["auto-round gptq"].config
    compressed, fp8 = FORMATS["pack-quantized"].config, FORMATS["fp8"].config
    group = compressed["config_groups"]["group_0"]
    regexes = [f"re:{p}" for p in patterns]
    return [
        compressed | {"ignore": regexes},
        compressed | {"config_groups": {r: group | {"targets": [r]} for r in regexes}},
        gptq | {"dynamic": {f"-:{p}": {} for p in patterns}},
        of_gptq | {"extra_config": {p: {"bits": 8} for p in patterns}},
        fp8 | {"modules_to_not_convert": regexes},
        dict(FORMATS["modelopt fp8"].config) | {"exclude_modules": patterns},
    ]


def fuzz_patterns(path: Path, n: int) -> Ends:
    ends = Ends()

    @settings(max_examples=n, **QUIET)  # type: ignore[arg-type]
    @given(st.data())
    def run(data: st.DataObject) -> None:
        few = st.lists(PIECES, min_size=1, max_size=40).map("".join)
        config = data.draw(
            st.sampled_from(with_patterns(data.draw(st.lists(few, min_size=1, max_size=4))))
        )

        def asked() -> None:
            scheme = scheme_of({"quantization_config": config}, jnp.float32)
            assert scheme is not None
            for name in SLOW_NAMES:
                scheme.form_of(name, 64)

        with within(SECONDS):
            ends[survives(asked)] += 1

    run()
    return ends


SHAPES = st.lists(st.integers(0, 70), max_size=3).map(tuple)
KINDS = st.sampled_from([np.int8, np.int32, np.uint8, np.float32, np.float16, np.int64])


def fuzz_tensors(path: Path, n: int) -> Ends:
    ends = Ends()

    @settings(max_examples=n, **QUIET)  # type: ignore[arg-type]
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(CASES))
        tensors = dict(SMALL.made[name])
        ending = data.draw(st.sampled_from(sorted(tensors)))
        what = data.draw(st.sampled_from(["drop", "shape", "kind", "bytes"]))
        x = tensors.pop(ending)
        if what == "shape":
            tensors[ending] = np.resize(x, data.draw(SHAPES))
        elif what == "kind":
            tensors[ending] = np.zeros(x.shape, data.draw(KINDS))
        elif what == "bytes":
            raw = np.array(x).reshape(-1).view(np.uint8).copy()
            for _ in range(3):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            tensors[ending] = raw.view(x.dtype).reshape(x.shape)
        SMALL.write(path, tensors)
        ends[survives(lambda: SMALL.read(path, dict(FORMATS[name].config)), MIB)] += 1

    run()
    return ends


TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
}
HEADER_VALUES = (
    st.integers(0, 2**32 - 1)
    | st.floats(width=32)
    | st.booleans()
    | st.text(max_size=6)
    | st.lists(st.integers(-5, 5), max_size=4)
    | st.lists(st.text(max_size=3), max_size=4)
)


def fuzz_gguf(path: Path, n: int) -> Ends:
    ends = Ends()
    model = Gguf(path, "llama", GGUF_CONFIG | {"num_hidden_layers": 2}, MIXED, **TOKENS)
    whole = model.path.read_bytes()
    header = whole.index(b"output.weight") + 64
    target = path / "fuzzed.gguf"

    def used() -> None:
        source = resolve(str(target))
        scheme = scheme_of(source.config, jnp.float32)
        family = quantised(family_for(source.config), scheme)
        family.specs(family.arch(source.config), 1)
        tensors = tensors_of(source)
        for name in list(tensors.names())[:8]:
            tensors.get(name, tensors.shape(name), ("uint8", "float32", "float16", "bfloat16"))
        load_tokenizer(target)

    @settings(max_examples=n, **QUIET)  # type: ignore[arg-type]
    @given(st.data())
    def run(data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            raw = bytearray(whole)
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(0, header))
                raw[at : at + 1] = data.draw(st.binary(min_size=0, max_size=9))
            target.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
        else:
            key = data.draw(st.sampled_from(sorted(model.metadata)))
            value = data.draw(HEADER_VALUES)
            target.write_bytes(gguf(model.metadata | {key: value}, model.tensors))
        ends[survives(used, 8 * MIB)] += 1

    run()
    return ends


FUZZERS = {
    "configs": fuzz_configs,
    "patterns": fuzz_patterns,
    "tensors": fuzz_tensors,
    "gguf": fuzz_gguf,
}


@pytest.mark.parametrize("name", FUZZERS)
def test_anything_ends_in_our_errors(tmp_path: Path, name: str) -> None:
    ends = FUZZERS[name](tmp_path, 25)
    assert ends.total() >= 25, "every input was tried"
    assert ends["refused"] > 0, "some are wrong"


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_anything_ends_in_our_errors_for_long(tmp_path: Path, name: str) -> None:
    n = 300 if name == "gguf" else 1000
    ends = FUZZERS[name](tmp_path, n)
    assert ends.total() >= n
    assert min(ends["refused"], ends["ran"]) > n // 50, "some are wrong and some are not"
