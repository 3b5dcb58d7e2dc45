"""Every backend against the reference on one table of ragged steps, with NaN in all KV that no
row may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.kv_layout import Span
from jserve.model import attn_dense, kv_quant
from jserve.model.attention import AttendArgs, AttentionBackend, backend
from jserve.model.attn_mesh import over_heads
from jserve.model.mesh import mesh_of
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.sharding import Sharding
from jserve.window import Window
from tests.model.driver import NoSlots, Row, pack

K, G, H, Z, M = 2, 2, 8, 8, 40
N_PAGES = 280
DIMS = StepDims(C=8, M=M, Z=Z, V=32)
FULL = M * Z
FULL_SPAN = Span()
SOFT_CAP = 5.0
"""Below the largest scores, which reach twice that."""
KINDS = [
    (FULL_SPAN, False, 0.0),
    (Span(window=11), False, 0.0),
    (Span(window=150), False, 0.0),
    (Span(chunk=21), True, 0.0),
    (FULL_SPAN, False, SOFT_CAP),
    (Span(window=150), False, SOFT_CAP),
]
"""What tokens see, whether sink logits join, and the soft cap of scores."""
SINK_LOGITS = np.array([2.5, -1.0, 0.3, 6.0], np.float32)
"""Of each query head; the last one takes most of the weight."""


@dataclass(frozen=True)
class Case:
    """(start, count) of the decode rows and of the prefill rows of one step."""

    decode: tuple[tuple[int, int], ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()


CASES = {
    "empty": Case(),
    "length 1": Case(decode=((0, 1),), prefill=((0, 1),)),
    "page border": Case(
        decode=((Z - 1, 1), (Z, 1), (2 * Z - 1, 1)), prefill=((0, Z), (Z, Z), (Z - 1, 2))
    ),
    "block border": Case(
        decode=((127, 1), (128, 1), (255, 1), (256, 1)), prefill=((127, 2), (120, 17))
    ),
    "all equal": Case(decode=((77, 1),) * 5, prefill=((30, 50),) * 3),
    "one long, rest short": Case(decode=((FULL - 1, 1), (0, 1), (2, 1), (5, 1), (1, 1))),
    "short first, long last": Case(decode=((0, 1), (3, 1), (9, 1), (30, 1), (FULL - 1, 1))),
    "whole bucket of one row": Case(prefill=((0, 160),)),
    "late chunk": Case(prefill=((FULL - 160, 160),)),
    "mixed": Case(decode=((19, 1), (200, 1), (64, 1)), prefill=((0, 131), (250, 9), (5, 20))),
    "decode only": Case(decode=((300, 1), (12, 1))),
    "prefill only": Case(prefill=((3, 1), (0, 2), (99, 3))),
}
VERIFY = {
    "drafts": Case(decode=((40, 3), (126, 3), (0, 3), (7, 2), (250, 1)), prefill=((0, 60),)),
    "drafts, few": Case(decode=((FULL - 3, 3),)),
}


def rows_of(case: Case, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows on random pages, each with its own."""
    free = (np.random.default_rng(seed).permutation(N_PAGES - 1) + 1).tolist()

    def row(span: tuple[int, int]) -> Row:
        start, count = span
        return Row([free.pop() for _ in range(-(-(start + count) // Z))], start, [1] * count)

    return [row(s) for s in case.decode], [row(s) for s in case.prefill]


def content(row_key: Any, start: int, count: int, what: int) -> np.ndarray:
    """The values of positions start .. start+count of a row: the same whatever the batch."""
    rng = np.random.default_rng([what, *row_key])
    return rng.standard_normal((FULL, K, H), np.float32)[start : start + count]


def queries(row_key: Any, start: int, count: int) -> np.ndarray:
    rng = np.random.default_rng([9, *row_key])
    return rng.standard_normal((FULL, K * G, H), np.float32)[start : start + count]


def run(
    name: str,
    case: Case,
    *,
    J: int = 1,
    span: Span = FULL_SPAN,
    logits: bool = False,
    soft_cap: float = 0.0,
    seed: int = 0,
    keys: tuple[int, ...] = (),
    stored: Any = jnp.float32,
    bucket: Bucket | None = None,
    release: bool = False,
) -> list[np.ndarray]:
    """Attention output of each row, decode rows first; checks that padding is finite. ``release``
    gives the pages behind each row's span back: their entries are 0, their content is NaN."""
    attn = backend(name)
    bucket = bucket or Bucket(D=5, P=160, F=3, J=J)
    decode, prefill = rows_of(case, seed)
    rows = decode + prefill
    ids = keys or tuple(range(len(rows)))
    pools = [np.full((N_PAGES, Z, K, H), np.nan, np.float32) for _ in range(2)]
    step = np.zeros((3, bucket.T, K * G, H), np.float32)
    spans, at = [], bucket.D * bucket.J
    for r, (row, key) in enumerate(zip(rows, ids, strict=True)):
        first = r * bucket.J if r < len(decode) else at
        at += 0 if r < len(decode) else len(row.tokens)
        spans.append((first, len(row.tokens)))
        _fill(pools, step, row, (key,), first)
        for i in Window(page_size=Z, tokens=span.most).gone(row.start) if release else ():
            for pool in pools:
                pool[row.pages[i]] = np.nan
            row.pages[i] = 0
    kv = tuple(_layout(attn, p, stored) for p in pools)
    buf = pack(bucket, DIMS, attn, decode, prefill)
    out = np.asarray(_compiled(name, bucket, span, logits, soft_cap)(buf, *step[:, :], kv))
    assert np.isfinite(out).all()
    return [out[first : first + n] for first, n in spans]


def _fill(pools: list[np.ndarray], step: np.ndarray, row: Row, key: Any, first: int) -> None:
    n = len(row.tokens)
    for what, pool in enumerate(pools):
        past = content(key, 0, row.start, what)
        for p, x in enumerate(past):
            pool[row.pages[p // Z], p % Z] = x
        step[1 + what, first : first + n, :K] = content(key, row.start, n, what)
    step[0, first : first + n] = queries(key, row.start, n)


def _layout(attn: AttentionBackend, pool_PZKH: np.ndarray, stored: Any) -> jax.Array:
    shape = attn.kv_shape(K, H, N_PAGES, Z)
    pool = pool_PZKH if shape == pool_PZKH.shape else pool_PZKH.swapaxes(1, 2)
    assert pool.shape == shape
    return kv_quant.stored(jnp.asarray(pool), attn.kv_dtype(stored))


def _step_args(name: str, bucket: Bucket) -> list[Any]:
    """Shapes of the arguments of a compiled step."""
    attn = backend(name)
    buf = jax.ShapeDtypeStruct(pack(bucket, DIMS, attn, [], []).shape, jnp.int32)
    x = jax.ShapeDtypeStruct((bucket.T, K * G, H), jnp.float32)
    pool = jax.ShapeDtypeStruct(attn.kv_shape(K, H, N_PAGES, Z), jnp.float32)
    return [buf, x, x, x, (pool, pool)]


@lru_cache
def _compiled(
    name: str, bucket: Bucket, span: Span, logits: bool = False, soft_cap: float = 0.0
) -> Any:
    asked = {
        "window": span.window,
        "chunk": span.chunk,
        "scale": 0.4,
        "sink_logits_N": SINK_LOGITS if logits else None,
        "soft_cap": soft_cap,
    }
    return jax.jit(partial(_step, backend(name), bucket, asked))


def _step(
    attn: Any, bucket: Bucket, asked: dict[str, Any], buf: Any, q: Any, k: Any, v: Any, kv: Any
) -> Any:
    zeros = jnp.zeros(DIMS.C, jnp.int32)
    fields = layout(bucket, DIMS, attn.plan_shapes(bucket, DIMS))
    view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
    kv = attn.write_kv(kv, k[:, :K], v[:, :K], view)
    return attn.attend(AttendArgs(q_TNH=q, **asked), kv, view)


def test_kernels_in_a_partitioned_step_see_the_heads_of_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA's attention in place of kernels, which the partitioner could not cut; it notes the heads that it sees."""
    plain, span, seen = backend("xla"), Span(window=11), set()
    want = run("xla", CASES["mixed"], span=span, logits=True)

    def attend(args: AttendArgs, kv: Any, view: Any) -> jax.Array:
        seen.add((args.q_TNH.shape[1], args.sink_logits_N.shape, kv[0].shape[plain.kv_axis]))
        return plain.attend(args, kv, view)

    over = over_heads(
        replace(plain, name="native", attend=attend), mesh_of(Sharding.of("tp=2")), "tp"
    )
    monkeypatch.setattr(f"{__name__}.backend", lambda name: over)
    _compiled.cache_clear()
    got = run("xla", CASES["mixed"], span=span, logits=True)
    _compiled.cache_clear()
    assert seen == {(K * G // 2, (K * G // 2,), K // 2)}
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def dense(case: Case, r: int, span: Span, logits: bool, soft_cap: float) -> np.ndarray:
    """The same attention of one row in float64 numpy, without pages."""
    start, n = (case.decode + case.prefill)[r]
    k, v = (content((r,), 0, start + n, what).astype(np.float64) for what in range(2))
    out = np.zeros((n, K * G, H))
    for i, q in enumerate(queries((r,), start, n)):
        at = start + i
        low = max(at + 1 - span.window, 0) if span.window else 0
        low = at - at % span.chunk if span.chunk else low
        for h in range(K * G):
            score = k[low : at + 1, h // G] @ q[h] * 0.4
            p = np.exp(soft_cap * np.tanh(score / soft_cap) if soft_cap else score)
            total = p.sum() + (np.exp(SINK_LOGITS[h]) if logits else 0.0)
            out[i, h] = p / total @ v[low : at + 1, h // G]
    return out


@pytest.fixture(params=["xla", "dense", "dense, rungs", "dense, groups"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every backend that serves on a CPU, and ``dense`` with what long contexts and large batches take:
    several rungs, and tiles that go one group after another."""
    name, _, how = request.param.partition(", ")
    if how == "rungs":
        monkeypatch.setattr(attn_dense, "SHORTEST", 32)
    if how == "groups":
        monkeypatch.setattr(attn_dense, "GATHERED", 1 << 19)
    if how:
        _compiled.cache_clear()
    yield name
    if how:
        _compiled.cache_clear()


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("span", "logits", "soft_cap"), KINDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_ref(case: str, span: Span, logits: bool, soft_cap: float, name: str) -> None:
    want = run("ref", CASES[case], span=span, logits=logits, soft_cap=soft_cap)
    got = run(name, CASES[case], span=span, logits=logits, soft_cap=soft_cap)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("span", "logits", "soft_cap"), [KINDS[0], KINDS[1], KINDS[3], KINDS[5]], ids=str
)
@pytest.mark.parametrize("case", VERIFY)
def test_rows_of_several_tokens(
    case: str, span: Span, logits: bool, soft_cap: float, name: str
) -> None:
    want = run("ref", VERIFY[case], J=3, span=span, logits=logits, soft_cap=soft_cap)
    got = run(name, VERIFY[case], J=3, span=span, logits=logits, soft_cap=soft_cap)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["ref", "xla", "dense"])
@pytest.mark.parametrize(
    "span", [Span(window=1), Span(window=11), Span(window=150), Span(chunk=21)], ids=str
)
@pytest.mark.parametrize("case", ["one long, rest short", "late chunk", "mixed", "block border"])
def test_pages_given_back_are_not_missed(case: str, span: Span, name: str) -> None:
    want = run(name, CASES[case], span=span)
    got = run(name, CASES[case], span=span, release=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("span", "logits", "soft_cap"), KINDS, ids=str)
def test_ref_agrees_with_dense_numpy(span: Span, logits: bool, soft_cap: float) -> None:
    case = CASES["mixed"]
    for r, got in enumerate(run("ref", case, span=span, logits=logits, soft_cap=soft_cap)):
        np.testing.assert_allclose(got, dense(case, r, span, logits, soft_cap), atol=2e-6)


@pytest.mark.parametrize(
    ("span", "logits", "soft_cap"), [KINDS[0], KINDS[1], KINDS[3], KINDS[4]], ids=str
)
def test_decode_row_does_not_depend_on_the_batch(span: Span, logits: bool, soft_cap: float) -> None:
    together = run(
        "xla", CASES["one long, rest short"], span=span, logits=logits, soft_cap=soft_cap
    )
    for r, place in enumerate(CASES["one long, rest short"].decode):
        alone = run(
            "xla",
            Case(decode=(place,)),
            span=span,
            logits=logits,
            soft_cap=soft_cap,
            seed=5,
            keys=(r,),
        )
        np.testing.assert_array_equal(alone[0], together[r])


def test_chunks_give_what_the_whole_gives(name: str) -> None:
    whole = run(name, Case(prefill=((0, 160),)))[0]
    for cut in (1, 64, 129):
        head = run(name, Case(prefill=((0, cut),)))[0]
        tail = (
            run(name, Case(prefill=((0, 1), (cut, 160 - cut))), keys=(7, 0))[1]
            if cut > 1
            else (run(name, Case(prefill=((cut, 159),)))[0])
        )
        np.testing.assert_allclose(np.concatenate([head, tail]), whole, atol=1e-6)


@pytest.mark.one_in(2)
def test_buckets_give_the_same(name: str) -> None:
    case = Case(decode=((200, 1),), prefill=((17, 40),))
    small = run(name, case, bucket=Bucket(D=1, P=40, F=1))
    for a, b in zip(small, run(name, case), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_bfloat16_kept_as_bits() -> None:
    assert backend("xla").kv_dtype(jnp.bfloat16) == jnp.uint16
    want = run("ref", CASES["mixed"])
    got = run("xla", CASES["mixed"], stored=jnp.bfloat16)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03)
        assert np.abs(a - b).max() > 1e-5, "bfloat16 was not used"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=str)
def test_dense_over_narrow_kv(dtype: Any) -> None:
    want = run("ref", CASES["mixed"], stored=dtype)
    got = run("dense", CASES["mixed"], stored=dtype)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03)
    wide = run("dense", CASES["mixed"])
    assert max(np.abs(a - b).max() for a, b in zip(got, wide, strict=True)) > 1e-4


def test_dense_stays_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows at once where less memory is allowed."""
    bucket, taken = Bucket(D=64, P=0, F=0), {}
    for room in (1 << 22, 1 << 20):
        monkeypatch.setattr(attn_dense, "GATHERED", room)
        _compiled.cache_clear()
        compiled = (
            _compiled("dense", bucket, FULL_SPAN).lower(*_step_args("dense", bucket)).compile()
        )
        taken[room] = compiled.memory_analysis().temp_size_in_bytes
    _compiled.cache_clear()
    keys_and_values = 2 * bucket.D * FULL * K * H * 4
    assert keys_and_values < taken[1 << 22] < 1 << 22
    assert taken[1 << 20] < taken[1 << 22] / 2


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_backend") as e:
        backend("cuda")
    assert e.value.field == "attention_backend"
