"""Every kernel and whole steps compiled for an H200 that is not there: registers, shared memory,
copies, command buffers. Skipped without the CUDA plugin (see conftest)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import passes
from jserve.model.arch import resized, with_kv_forms
from jserve.model.attention import AttendArgs, backend
from jserve.model.attn_dense import GATHERED
from jserve.model.features import MASK
from jserve.model.largest import BY_KERNEL, PARTS
from jserve.model.step import slot_shapes
from jserve.model.view import Bucket, StepDims, buffer_size, unpack
from jserve.runner.programs import compile_options
from jserve.sizing.compiled import compile_step
from pallas_kernels import aot
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import tile_of
from pallas_kernels.paged_attention.combine import FEW, MANY_SPLITS
from pallas_kernels.paged_attention.hopper import Tile, _scratch as decode_scratch
from pallas_kernels.ragged_prefill import ragged_prefill
from pallas_kernels.ragged_prefill.api import tile_of as prefill_tile
from pallas_kernels.ragged_prefill.hopper import TEAM, _scratch as prefill_scratch
from pallas_kernels.spec import AttentionSpec, Chunks, Pages, Rows
from tests.pallas_kernels import tma
from tests.pallas_kernels.barriers import check_barriers
from tests.pallas_kernels.shapes import ARCHS, step_model
from tests.pallas_kernels.variants import CHAINS, F8, I8, VARIANTS, Variant

pytestmark = pytest.mark.usefixtures("h200")


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> Any:
    return struct(*shape, dtype=jnp.int32)


SPILLS = {"int8, small pages": 192, "int8, everything": 192}
"""Bytes that chunks over these spill at most (a miss, docs/kernels.md says so); all else spills none."""


def check(
    report: aot.Report, n_kernels: int, computing: int, loading: int, spills: int = 0
) -> None:
    """The first kernel has ``computing`` and ``loading`` warpgroups, the others have one."""
    assert len(report.kernels) == n_kernels
    check_registers(report.kernels[0], computing, loading)
    for kernel in report.kernels[1:]:
        check_registers(kernel, 1, 0)
    assert report.spills <= spills, report.kernels
    assert 0 < report.smem_bytes <= aot.SMEM_LIMIT
    assert not report.ignored, "ptxas did not honour the registers that were asked for"


def check_registers(kernel: aot.Kernel, computing: int, loading: int) -> None:
    """``setmaxnreg.inc`` waits until the block's registers suffice: for ever, if the budgets sum to more."""
    warpgroups = computing + loading
    assert kernel.threads == 128 * warpgroups
    assert len(kernel.budgets) in (0, 2)
    if kernel.budgets:
        budget = dict(kernel.budgets)
        assert computing * budget["inc"] + loading * budget["dec"] <= kernel.registers * warpgroups
        assert budget["dec"] <= kernel.registers <= budget["inc"]


def check_descriptors(found: list[tma.Descriptor], scales: int = 0) -> None:
    """Of two operands at least, what is multiplied and its ``scales``, and an output."""
    assert len(found) >= 4 + scales
    assert not [fault for descriptor in found for fault in descriptor.faults()]


def test_the_check_sees_descriptors_that_a_driver_refuses() -> None:
    good = tma.Descriptor(
        sizes=(64, 8, 64), strides=(512, 64, 1), box=(8, 8, 64), bits=16, swizzle=128
    )
    assert not good.faults()
    bad = {
        "rank 6": {"sizes": (1,) * 6, "strides": (8,) * 5 + (1,), "box": (1,) * 5 + (8,)},
        "another rank": {"box": (8, 64)},
        "size": {"sizes": (0, 8, 64)},
        "side of the box": {"box": (257, 8, 64)},
        "innermost stride": {"strides": (512, 64, 2)},
        "multiples of 16": {"strides": (500, 60, 1)},
        "below 2": {"strides": (1 << 40, 64, 1)},
        "not a multiple of 16": {"box": (8, 8, 60)},
        "the swizzle 64": {"swizzle": 64},
    }
    for rule, change in bad.items():
        faults = dataclasses.replace(good, **change).faults()
        assert any(rule in fault for fault in faults), (rule, faults)


def test_the_check_sees_budgets_that_are_larger_than_the_block() -> None:
    of = {"name": "k", "registers": 168, "spill_bytes": 0, "stack_bytes": 0, "threads": 384}
    check_registers(aot.Kernel(**of, budgets=(("inc", 224), ("dec", 56))), 2, 1)
    with pytest.raises(AssertionError):
        check_registers(aot.Kernel(**of, budgets=(("inc", 224), ("dec", 64))), 2, 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_paged_attention(name: str) -> None:
    check_decode(VARIANTS[name])


def test_the_forms_that_bench_gpu_runs_first() -> None:
    """Weights in shared memory, as the interpreter runs them: the first attention that a GPU sees."""
    check_decode(VARIANTS["8b"], register_p=False, teams=1)
    check_prefill(CHAINS["8b"], register_p=False, ping_pong=False)


def check_decode(v: Variant, **tune: Any) -> None:
    D = 64
    N, spec = v.K * v.G, AttentionSpec(scale=0.1, tune=tune, **v.static)

    def call(q: Any, pages: Pages, start: Any, length: Any, more: Any) -> Any:
        rows = Rows(start, length)
        more = {"dtype": jnp.bfloat16, **more}
        return paged_attention(q, pages, rows, spec, tree=v.tree, **more)

    q = struct(D, v.tokens, N, v.H)
    tile = tile_of(q, pages_of(v, D).keys_PKZH, spec, v.tree)
    with tma.recorded() as descriptors:
        report = aot.compile_for(call, q, pages_of(v, D), ints(D), ints(D), arrays(v))
    check_descriptors(descriptors, 2 if v.dtype == I8 else 0)
    check(report, 2, tile.teams * tile.warpgroups, tile.teams)
    check_barriers(report.kernels[0].ptx, decode_scratch(tile, q.dtype, v.dtype))
    check_combine(report.kernels[1], tile, v)


def check_combine(kernel: aot.Kernel, tile: Tile, v: Variant) -> None:
    """It has nothing to wait for but its loads: two a slot, all of a round before its arithmetic."""
    assert not re.search(r"mbarrier\.|cp\.async|\.shared", kernel.ptx)
    wide = 32 if tile.splits > MANY_SPLITS else 8
    rounds = [r for r in map(loads_of_a_round, re.split(r"^\$L", kernel.ptx, flags=re.M)) if r]
    assert rounds == [2 * wide, 2 * FEW]
    around = 3 + v.sinks  # two borders of the row, blocks of a split, a sink
    assert len(LOAD.findall(kernel.ptx)) == sum(rounds) + around
    assert kernel.registers <= (160 if wide > 8 else 64), "fewer blocks at once on a multiprocessor"
    bits = 32 if v.dtype == F8 or tile.H > 128 else 16  # values of 8 bits are scaled afterwards
    assert re.search(rf"\bst\.(?:global\.)?b{bits}\b", kernel.ptx)


def loads_of_a_round(block: str) -> int:
    """Loads of a block of PTX that raises to powers, as a round of slots does; 0 for others."""
    before, found, after = block.partition("ex2.approx")
    assert not (found and LOAD.search(before) and LOAD.search(after)), "a load waits for arithmetic"
    return len(LOAD.findall(before)) if found else 0


LOAD = re.compile(r"\bld\.(?:global\.)?(?:v2\.)?b32\b")


def pages_of(v: Variant, rows: int) -> Pages:
    """The shapes of a variant's pool, and of the pages of its rows."""
    pool, scales = (
        struct(1024, v.K, v.Z, v.H, dtype=v.dtype),
        struct(1024, v.K, v.Z, dtype=jnp.float32),
    )
    pages = Pages(pool, pool, ints(rows, 64))
    return pages._replace(k_scales_PKZ=scales, v_scales_PKZ=scales) if v.dtype == I8 else pages


def arrays(v: Variant) -> dict[str, Any]:
    """The shapes of a variant's own arrays."""
    found = {}
    if v.sinks:
        found["sinks_N"] = struct(v.K * v.G, dtype=jnp.float32)
    if v.dtype == F8:
        found["scales_2K"] = struct(2, v.K, dtype=jnp.float32)
    return found


@pytest.mark.parametrize("name", CHAINS)
def test_ragged_prefill(name: str) -> None:
    check_prefill(CHAINS[name], SPILLS.get(name, 0))


def check_prefill(v: Variant, spills: int = 0, **tune: Any) -> None:
    P, F = 2048, 8
    N, spec = v.K * v.G, AttentionSpec(scale=0.1, tune=tune, **v.static)

    def call(q: Any, pages: Pages, a: Any, b: Any, c: Any, more: Any) -> Any:
        return ragged_prefill(q, pages, Chunks(a, b, c), spec, **more)

    args = (struct(P, N, v.H), pages_of(v, F), ints(F), ints(F), ints(F), arrays(v))
    with tma.recorded() as descriptors:
        report = aot.compile_for(call, *args)
    check_descriptors(descriptors, 2 if v.dtype == I8 else 0)
    check(report, 1, TEAM, 1, spills)
    scratch = prefill_scratch(
        prefill_tile(args[0], args[1].keys_PKZH, F, spec), args[0].dtype, v.dtype
    )
    check_barriers(report.kernels[0].ptx, scratch)


@pytest.mark.parametrize("H", [64, 128])
def test_scores_ahead_of_the_softmax(H: int) -> None:
    """Without a spill; in the loop of plain blocks all exponentials lie between the start of one product and that of
    the next, and nothing waits between them."""
    spec = AttentionSpec(scale=0.1, tune={"ahead": True})

    def call(q: Any, k: Any, v: Any, table: Any, a: Any, b: Any, c: Any) -> Any:
        return ragged_prefill(q, Pages(k, v, table), Chunks(a, b, c), spec)

    pool, F = struct(1024, 8, 64, H), 8
    args = (struct(2048, 32, H), pool, pool, ints(F, 64), ints(F), ints(F), ints(F))
    report = aot.compile_for(call, *args)
    check(report, 1, TEAM, 1)
    steps = re.findall(r"wgmma\.mma_async|wgmma\.wait_group|ex2\.approx", report.kernels[0].ptx)
    order = [step for step, _ in itertools.groupby(steps)]
    product, exponential = "wgmma.mma_async", "ex2.approx"
    ahead = [
        order[i - 1 : i + 2] == [product, exponential, product]
        for i, step in enumerate(order)
        if step == exponential
    ]
    assert sum(ahead) == 1, order


def layer_bytes(model: Any) -> int:
    """Bytes of one layer's keys and values on one device."""
    return model.n_pages * model.kv.page_bytes // model.arch.L


def smallest_matrix(model: Any) -> int:
    arch = model.arch
    return 2 * arch.D * arch.N * arch.H // model.tp


TEAMS = {2: (1, 1), 3: (2, 1), 4: (2, 2)}
"""Warpgroups of a kernel that loads beside computing -> (those that compute, those that load)."""


def check_step(
    name: str,
    bucket: Bucket,
    tp: int = 1,
    layers: int = 0,
    n_pages: int = 2048,
    kv_dtype: Any = jnp.bfloat16,
    attn: str = "hopper",
) -> aot.Report:
    """All that holds for a step of any model; ``layers`` 0 is the model's own depth. Over 8 bits the
    checkpoint has scales, too; over bytes (``I8``) each key and value has one, but in the first layer."""
    arch = dataclasses.replace(ARCHS[name], kv_scales="tensor" if kv_dtype == F8 else "")
    arch = resized(arch, L=layers) if layers else arch
    if kv_dtype == I8:
        arch = with_kv_forms(arch, "int8_per_token_head", ("0",), "bfloat16")
    # A device's share of the pool is the same however many there are, as in an engine.
    model = step_model(arch, tp=tp, n_pages=n_pages * tp, kv_dtype=kv_dtype)
    model = dataclasses.replace(model, backend=backend(attn, "cuda"))
    report = compile_step(model, bucket)
    parts = (bucket.D > 0) * 2 + (bucket.P > 0)  # attention and its combination; prefill
    parts += 3 * (attn == "hopper_fused")
    assert report.spills == 0, report.kernels
    for kernel in report.kernels:
        if kernel.budgets:
            check_registers(kernel, *TEAMS[kernel.threads // 128])
    assert not report.ignored
    assert 0 < report.smem_bytes <= aot.SMEM_LIMIT
    assert report.temp_bytes < layer_bytes(model), "scratch is as large as a layer's KV"
    assert report.alias_bytes >= arch.L * layer_bytes(model), "KV is not updated in place"
    large = report.copies(min(layer_bytes(model) // 2, smallest_matrix(model)))
    moved = [copy for copy in large if re.search(r" (bf16|f8e4m3fn|s8)\[", copy)]
    assert not moved, moved
    assert report.launches() == ["kCommandBuffer"], "a step is not one CUDA graph"
    if not reads_queries_where_they_lie(model, bucket):
        assert "kDynamicSliceFusion" not in report.thunks, "a kernel reads a slice of another array"
    assert len(re.findall(r"\d: kCustomCall ", report.thunks)) == parts * arch.L
    assert max(report.sorts(), default=0) <= PARTS * BY_KERNEL, "a sort of the vocabulary"
    check_weights(report, model)
    check_collectives(report, model)
    return report


def reads_queries_where_they_lie(model: Any, bucket: Bucket) -> bool:
    """Beside chunks, where a row's queries of a kv head need neither padding nor another order: nothing is done to
    those of decode rows, which are the first of all tokens'."""
    heads = max(model.arch.K // model.tp, 1)
    rows = bucket.J * model.arch.N // model.tp // heads
    return bucket.P > 0 and (heads == 1 or bucket.J == 1) and rows % 8 == 0


def check_weights(report: aot.Report, model: Any) -> None:
    """One instruction reads each matrix; of the embedding, another one picks the tokens' rows."""
    module = report.module
    matrices = {
        name: n
        for name, n in module.reads("params").items()
        if module.size(name) >= smallest_matrix(model)
    }
    embed = "params['embed']"
    assert len(matrices) == 4 * model.arch.L + (1 if model.arch.tied else 2)
    assert matrices.pop(embed) == (2 if model.arch.tied else 1)
    assert set(matrices.values()) == {1}, matrices


def check_collectives(report: aot.Report, model: Any) -> None:
    """Two sums a layer and one for the embedding; the logits are gathered."""
    found = Counter(report.collectives())
    sums = {"all-reduce": 2 * model.arch.L + 1, "all-gather": 1}
    assert found == (sums if model.tp > 1 else {})


def weight_bytes(model: Any) -> int:
    """What one device must read of the weights: all but the rows of an untied embedding."""
    arch = model.arch
    heads = arch.N * 2 + 2 * max(arch.K, model.tp)
    layer = heads * arch.H * arch.D + 3 * arch.D * arch.F
    return 2 * (arch.L * layer + arch.V * arch.D) // model.tp


def test_decode_step_of_1b_at_full_depth() -> None:
    report = check_step("llama-3.2-1b", Bucket(D=8, P=0, F=0))
    assert report.nodes() < 420
    model = step_model(ARCHS["llama-3.2-1b"])
    assert report.flops > 8 * weight_bytes(model)
    assert 1 < report.module.moved("state.kv") / weight_bytes(model) < 1.1


@pytest.mark.parametrize(
    ("name", "batch", "kernels", "in_a_row"),
    [("llama-3.1-8b", 1, 14, 12), ("llama-3.1-8b", 64, 14, 12), ("qwen3-8b", 1, 18, 14)],
)
def test_kernels_of_a_layer(name: str, batch: int, kernels: int, in_a_row: int) -> None:
    """Nothing lies between attention and the product that reads it."""
    found = passes.layer(name, batch)
    assert (len(found.passes), found.chain) == (kernels, in_a_row)
    after = [p.op for p in found.passes]
    last = max(i for i, op in enumerate(after) if op == "custom-call")
    assert after[last - 1 : last + 2] == ["custom-call", "custom-call", "dot"]


def test_a_whole_product_before_the_gate_is_written_in_16_bits() -> None:
    found = passes.layer("llama-3.2-1b", 256)
    (product,) = found.groups()["product gate_up"]
    assert product.written == 256 * 2 * ARCHS["llama-3.2-1b"].F * 2


@pytest.mark.parametrize(("name", "batch"), [("llama-3.1-8b", 1), ("qwen3-8b", 64)])
def test_kernels_of_a_fused_layer(name: str, batch: int) -> None:
    """Between the products kernels of ours, and what gates the MLP."""
    found = passes.layer(name, batch, "hopper_fused")
    ours = ["custom-call"]
    kinds = ["dot", *ours * 3, "dot", *ours, "dot", "convert", "dot", *ours]
    assert [p.op for p in found.passes] == kinds
    assert found.chain == len(kinds) == 10


@pytest.mark.parametrize("tp", [1, 2])
def test_fused_step(tp: int) -> None:
    """KV in place and one graph, also where partial sums go to other devices first."""
    report = check_step("llama-3.2-1b", Bucket(D=8, P=0, F=0), tp, layers=2, attn="hopper_fused")
    assert {k.threads for k in report.kernels[-2:]} == {128}


def test_mixed_step_of_1b() -> None:
    check_step("llama-3.2-1b", Bucket(D=16, P=256, F=4), layers=2)


def test_masks_of_1b() -> None:
    """A draw with masks is a loop: of the draw with them, and of the one without where a row may have it."""
    check_step("llama-3.2-1b", Bucket(D=16, P=0, F=0, features=(MASK,)), layers=2)
    check_step("llama-3.2-1b", Bucket(D=16, P=256, F=4, features=(MASK,)), layers=2)


def test_verify_step_of_1b() -> None:
    check_step("llama-3.2-1b", Bucket(D=8, P=0, F=0, J=4), layers=2)


def test_verify_step_of_1b_beside_prefill() -> None:
    check_step("llama-3.2-1b", Bucket(D=8, P=128, F=4, J=4), layers=2)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, F8], ids=["16 bits", "8 bits"])
def test_a_tree_beside_prefill(kv_dtype: Any) -> None:
    """The path that stands is moved in place, too."""
    bucket = Bucket(D=8, P=128, F=4, J=8, tree=(0, 0, 0, 1, 1, 2, 4))
    check_step("llama-3.1-8b", bucket, layers=2, kv_dtype=kv_dtype)


@pytest.mark.parametrize("bucket", [Bucket(D=8, P=0, F=0), Bucket(D=16, P=256, F=4)], ids=str)
def test_steps_over_bytes(bucket: Bucket) -> None:
    """int8 and its scales, and a layer of bfloat16 as bytes: views of the pool, no copies."""
    check_step("llama-3.2-1b", bucket, layers=2, kv_dtype=I8)


def test_two_layers_over_8_bits_of_a_sharded_step() -> None:
    bucket = Bucket(D=16, P=256, F=4)
    check_step("qwen3-8b", bucket, 4, layers=2, n_pages=4096, kv_dtype=F8)


@pytest.mark.parametrize(
    ("name", "bucket", "tp"),
    [
        ("llama-3.1-8b", Bucket(D=64, P=0, F=0), 2),
        ("llama-3.1-8b", Bucket(D=16, P=256, F=4), 8),
        ("qwen2.5-7b", Bucket(D=64, P=0, F=0), 4),
        ("qwen3-8b", Bucket(D=64, P=0, F=0), 8),
    ],
    ids=str,
)
def test_two_layers_of_a_sharded_step(name: str, bucket: Bucket, tp: int) -> None:
    check_step(name, bucket, tp, layers=2)


def test_attention_beside_chunks_reads_no_slices() -> None:
    """Of what all rows of a step have, decode attention takes the first ones and prefill the others."""
    arch, bucket = ARCHS["qwen2.5-7b"], Bucket(D=64, P=2048, F=8)
    model = step_model(arch)
    fields, dims, attn = model.fields(bucket), model.dims, model.backend

    def call(buf: Any, slots: Any, q_TNH: Any, k: Any, v: Any) -> Any:
        view = unpack(buf, fields, bucket, dims, slots)
        args = AttendArgs(q_TNH=q_TNH, window=0, scale=0.1, o_dtype=jnp.bfloat16)
        return attn.attend(args, (k, v), view)

    pool = struct(2048, arch.K, 64, arch.H)
    q_TNH, buf = struct(bucket.T, arch.N, arch.H), ints(buffer_size(fields))
    args = (buf, slot_shapes(dims), q_TNH, pool, pool)
    report = aot.compile_for(call, *args, options=compile_options("cuda"))
    assert report.launches() == ["kCommandBuffer"]
    assert "kDynamicSliceFusion" not in report.thunks


def test_dense_attention_is_a_handful_of_kernels() -> None:
    """In every rung: 64 rows of 2,048 tokens go at once, within the memory that it allows itself, in the
    same CUDA graph, and the pool is not copied."""
    arch = resized(ARCHS["llama-3.1-8b"], L=1)
    dims = StepDims(C=256, M=32, Z=64, V=arch.V)
    model = dataclasses.replace(step_model(arch), backend=backend("dense", "cuda"), dims=dims)
    report = compile_step(model, Bucket(D=64, P=0, F=0))
    assert report.launches() == ["kCommandBuffer"]
    attention = re.split(r"\n    \d+: ", report.thunks.split("kConditional")[1])[0]
    rungs = [re.findall(r"\d+: (k\w+)", part) for part in re.split(r"branch_\d+:", attention)[1:]]
    assert len(rungs) == 2
    for kinds in rungs:
        assert len(kinds) <= 9
        assert "kWhile" not in kinds
    assert "kDynamicSliceFusion" not in report.thunks
    assert report.temp_bytes < GATHERED + (128 << 20), "beside it logits"
    assert not [c for c in report.copies(layer_bytes(model) // 2) if " bf16[" in c]


def test_the_checks_see_a_step_that_is_not_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA's own choice the sampler's conditional and the collectives lie outside."""
    monkeypatch.setattr("jserve.sizing.compiled.compile_options", lambda *_: {})
    with pytest.raises(AssertionError, match="not one CUDA graph"):
        check_step("llama-3.2-1b", Bucket(D=2, P=0, F=0), layers=1)


MODELS = ["llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS[1:], "llama-3.1-70b"])
def test_decode_step_at_full_depth(name: str) -> None:
    """The 70B shape over eight devices, the others on one."""
    check_step(name, Bucket(D=8, P=0, F=0), tp=8 if "70b" in name else 1)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bucket", [Bucket(D=256, P=0, F=0), Bucket(D=64, P=2048, F=8)], ids=str)
def test_two_layers_of_every_model_on_every_mesh(name: str, bucket: Bucket, tp: int) -> None:
    if ARCHS[name].N % tp:
        pytest.skip(f"{ARCHS[name].N} heads are not divisible by {tp}")
    # Scratch of the large buckets is logits and activations; their engine has a larger pool.
    check_step(name, bucket, tp, layers=2, n_pages=8192)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, F8], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("name", MODELS)
def test_trees_and_8_bits_of_every_model(name: str, kv_dtype: Any) -> None:
    bucket = Bucket(D=32, P=512, F=8, J=8, tree=(0, 0, 0, 1, 1, 2, 4))
    # The same memory for KV, so twice the pages of 8 bits: scratch here is mostly logits.
    n_pages = 16384 // jnp.dtype(kv_dtype).itemsize
    check_step(name, bucket, tp=4, layers=2, n_pages=n_pages, kv_dtype=kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [4, 8])
def test_two_layers_of_a_mixed_step_of_70b(tp: int) -> None:
    check_step("llama-3.1-70b", Bucket(D=64, P=512, F=8), tp, layers=2, n_pages=8192)
