"""What is read out of a compiled program's text, over one small program with every rule in it."""

from __future__ import annotations

import pytest

from pallas_kernels.hlo import Module

TEXT = """HloModule jit_f

%fused_dot (param_0: bf16[8,4], param_1: bf16[16,4]) -> f32[8,16] {
  %param_0 = bf16[8,4]{1,0} parameter(0)
  %param_1 = bf16[16,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,16]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}
}

%fused_gather (param_0.1: bf16[16,4], param_1.1: s32[8]) -> bf16[8,4] {
  %param_0.1 = bf16[16,4]{1,0} parameter(0)
  %param_1.1 = s32[8]{0} parameter(1)
  ROOT %gather.1 = bf16[8,4]{1,0} gather(%param_0.1, %param_1.1), slice_sizes={1,4}
}

%fused_scatter (param_0.2: bf16[1024,4], param_1.2: f32[8,16]) -> bf16[1024,4] {
  %param_0.2 = bf16[1024,4]{1,0} parameter(0)
  %param_1.2 = f32[8,16]{1,0} parameter(1)
  %convert.1 = bf16[8,16]{1,0} convert(%param_1.2)
  %scatter.1 = bf16[1024,4]{1,0} scatter(%param_0.2, %convert.1), to_apply=%region
  ROOT %bitcast.9 = bf16[1024,4]{1,0} bitcast(%scatter.1)
}

ENTRY %main.1 (params__embed__.1: bf16[16,4], params__w__.1: bf16[16,4]) -> (f32[8,16]) {
  %params__embed__.1 = bf16[16,4]{1,0} parameter(0), metadata={op_name="params[\\'embed\\']"}
  %params__w__.1 = bf16[16,4]{1,0} parameter(1), metadata={op_name="params[\\'w\\']"}
  %state_kv.1 = bf16[16,64,4]{2,1,0} parameter(2), metadata={op_name="state.kv[0][0]"}
  %buf.1 = s32[8]{0} parameter(3), metadata={op_name="buf"}
  %rows = bf16[8,4]{1,0} fusion(%params__embed__.1, %buf.1), kind=kLoop, calls=%fused_gather
  %view = bf16[16,4]{1,0} bitcast(%params__w__.1)
  %dot = f32[8,16]{1,0} fusion(%rows, %view), kind=kCustom, calls=%fused_dot
  %head = f32[8,16]{1,0} fusion(%rows, %params__embed__.1), kind=kCustom, calls=%fused_dot
  %flat = bf16[1024,4]{1,0} bitcast(%state_kv.1)
  %written = bf16[1024,4]{1,0} fusion(%flat, %dot), kind=kInput, calls=%fused_scatter
  %kernel = (f32[8,16]{1,0}, f32[8]{0}) custom-call(%rows, %written), custom_call_target="k"
  %part = f32[8,16]{1,0} get-tuple-element(%kernel), index=0
  %put = (f32[8]{0}, bf16[1024,4]{1,0}) custom-call(%part, %written), output_to_operand_aliasing={{1}: (1, {})}
  %pool = bf16[1024,4]{1,0} get-tuple-element(%put), index=1
  %reader = f32[8]{0} custom-call(%pool), custom_call_target="k"
  %branch = f32[8,16]{1,0} conditional(%part, %head), branch_computations={%a, %b}
  ROOT %out = (f32[8,16]{1,0}) tuple(%branch)
}
"""
ROWS, IDS, DOT, W, KERNEL = 8 * 4 * 2, 8 * 4, 8 * 16 * 4, 16 * 4 * 2, 8 * 16 * 4 + 8 * 4
IN_PLACE, READER = 8 * 16 * 4 + 8 * 4, 8 * 4
"""Of the kernel that writes into the pool, and of the one that reads it."""


def test_bytes_moved() -> None:
    """Picked rows, not the table; views nothing; the pool and what is written into it nothing;
    a branch nothing."""
    picked = 2 * ROWS + IDS
    dots = 2 * (ROWS + W + DOT)
    scatter = DOT
    kernel = ROWS + KERNEL
    total = picked + dots + scatter + kernel + IN_PLACE + READER
    assert Module(TEXT).moved("state.kv") == total


def test_passes() -> None:
    """In order, with what each ends in, reads and waits for; views and branches are none."""
    passes = {p.name: p for p in Module(TEXT).passes("state.kv")}
    assert list(passes) == ["rows", "dot", "head", "written", "kernel", "put", "reader"]
    kernels = ["custom-call"] * 3
    assert [p.op for p in passes.values()] == ["gather", "dot", "dot", "scatter", *kernels]
    assert [p.depth for p in passes.values()] == [1, 2, 2, 3, 4, 5, 6]
    assert passes["dot"].reads == ("params['w']",)
    assert passes["written"].reads == ("state.kv[0][0]",)
    assert (passes["dot"].read, passes["dot"].written) == (ROWS + W, DOT)
    assert (passes["written"].read, passes["written"].written) == (DOT, 0)


def test_a_pool_that_is_not_apart_counts_what_is_visited() -> None:
    module, pool = Module(TEXT), 1024 * 4 * 2
    # The reader takes all of it, and so does the kernel that writes into it.
    assert module.moved("nothing") == module.moved("state.kv") + 3 * pool


def test_a_copied_pool_is_seen() -> None:
    copied = TEXT.replace("%flat = bf16[1024,4]{1,0} bitcast", "%flat = bf16[1024,4]{1,0} copy")
    assert Module(copied).moved("state.kv") >= Module(TEXT).moved("state.kv") + 1024 * 4 * 2


def test_readers() -> None:
    module = Module(TEXT)
    assert module.reads("params") == {"params['embed']": 2, "params['w']": 1}
    assert module.size("params['w']") == W
    twice = TEXT.replace(
        "%dot = f32[8,16]{1,0} fusion(%rows, %view)", "%dot = f32[8,16]{1,0} copy(%view)"
    )
    assert Module(twice + "").reads("params['w']") == {"params['w']": 1}
    again = TEXT.replace(
        "fusion(%rows, %params__embed__.1), kind=kCustom", "fusion(%rows, %view), kind=kCustom"
    )
    assert Module(again).reads("params") == {"params['embed']": 1, "params['w']": 2}


def test_bytes_of_parameters() -> None:
    """Of the embedding the rows that are picked, and all of it where it is multiplied; views count once."""
    assert Module(TEXT).bytes_read("params") == {"params['embed']": ROWS + W, "params['w']": W}


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("%a = pred[] parameter(0)", 1),
        ("%a = (f32[2,3]{1,0:T(8,128)}, (s8[4]{0}, bf16[0]{0})) parameter(0)", 28),
        ("%a = f8e4m3fn[7]{0} parameter(0)", 7),
        ("%a = s4[3,5]{1,0:E(4)} parameter(0)", 8),
    ],
)
def test_sizes_of_types(line: str, size: int) -> None:
    text = f"HloModule m\n\nENTRY %main (a: x) -> x {{\n  {line}\n}}\n"
    assert Module(text).entry[0].n_bytes == size
