"""Records of GPU calls become one table that shows what was measured and hides nothing that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu_report


def record(path: Path, *lines: dict) -> Path:
    path.write_text("\n".join(json.dumps({"tiny": False, **x}) for x in lines))
    return path


DEVICE = {"stage": "facts", "name": "device", "kind": "NVIDIA H200", "jax": "0.11.2", "torch": "-"}


def step(name: str, ms: float, **more) -> dict:
    return {
        "stage": "steps_8b",
        "name": name,
        "ms": ms,
        "tok_per_s": 1e3 / ms,
        "share": 0.5,
        **more,
    }


def test_the_later_call_counts(tmp_path: Path) -> None:
    old = record(tmp_path / "a", DEVICE, step("8b, batch 1, context 512", 9.0))
    new = record(
        tmp_path / "b", step("8b, batch 1, context 512", 4.0), step("8b, batch 8, context 512", 5.0)
    )
    table = gpu_report.markdown(gpu_report.merged([old, new]))
    assert table.startswith("NVIDIA H200, jax 0.11.2, torch -")
    assert "| steps_8b: 8b, batch 1, context 512 | 4.00 ms, 250 tok/s | 50% |" in table
    assert "batch 8" in table
    assert "9.00 ms" not in table


def test_failures_are_named_and_skips_are_not_shown(tmp_path: Path) -> None:
    file = record(
        tmp_path / "a",
        DEVICE,
        {"stage": "steps_8b", "name": "8b, batch 256, context 8192", "skipped": "no room"},
        {"stage": "verify", "name": "8b, batch 1, verify of 4", "error": "XlaRuntimeError: x"},
        {"stage": "decode_numerics", "name": "1b", "ok": True, "rel": 0.001},
        {"stage": "decode_numerics", "name": "8b", "ok": False, "rel": 0.5},
    )
    table = gpu_report.markdown(gpu_report.merged([file]))
    assert "8192" not in table
    assert "Failed: verify: 8b, batch 1, verify of 4." in table
    assert "Numerics: 1 of 2 comparisons within bounds." in table


def test_every_kind_of_figure_has_a_row(tmp_path: Path) -> None:
    file = record(
        tmp_path / "a",
        DEVICE,
        {"stage": "facts", "name": "read bandwidth", "bytes_per_s": 4.4e12},
        {"stage": "facts", "name": "matmul bfloat16", "tflops": 777.0},
        {
            "stage": "verify",
            "name": "8b, batch 1, verify of 3",
            "over_decode": 1.1,
            "tok_per_s_at_2": 400.0,
            "tok_per_s_at_3": 600.0,
        },
        {"stage": "decode_times", "name": "8b", "us": 10.0, "bytes_per_s": 4e12, "share": 0.9},
        {"stage": "attention_peers", "name": "torch flex, 1 x 4k", "us": 900.0, "tflops": 500.0},
        {
            "stage": "serving",
            "name": "1000/1000@128",
            "output_tok_s": 9000.0,
            "ttft_p50_ms": 50.0,
            "itl_p50_ms": 11.0,
        },
        {"stage": "peers", "name": "torch graph, 8b", "ms": 4.0, "tok_per_s": 250.0},
        {
            "stage": "steps_8b_fp8",
            "name": "8b, batch 1, context 2048",
            "ms": 2.5,
            "tok_per_s": 400.0,
            "share": 0.76,
        },
        {
            "stage": "gemm_times",
            "name": "8b gate_up, fp8, 64 rows",
            "us": 30.0,
            "bytes_per_s": 3.9e12,
            "tflops": 501.0,
            "share": 0.91,
            "cublaslt_us": 36.0,
            "cublaslt": "e4m3",
            "ratio": 1.2,
        },
    )
    table = gpu_report.markdown(gpu_report.merged([file]))
    for shown in (
        "4.40 TB/s",
        "777 TFLOP/s",
        "1.10 x a decode step",
        "400, 600",
        "4.00 TB/s | 90%",
        "2.50 ms, 400 tok/s | 76%",
        "30.0 us, 3.90 TB/s, 501 TFLOP/s; cuBLASLt (e4m3) 36.0 us: 1.20 x | 91%",
    ):
        assert shown in table
    for shown in ("900 us, 500 TFLOP/s", "9,000 tok/s, TTFT 50 ms, ITL 11.0 ms", "250 tok/s"):
        assert shown in table


def test_tiny_and_empty_records_are_refused(tmp_path: Path, capsys) -> None:
    tiny = tmp_path / "tiny"
    tiny.write_text(json.dumps({**DEVICE, "tiny": True}))
    for file in (tiny, tmp_path / "none"):
        with pytest.raises(SystemExit):
            gpu_report.main([str(file)])
    assert "mean nothing" in capsys.readouterr().err


def test_the_page_and_the_result_file(tmp_path: Path, capsys) -> None:
    page, out = tmp_path / "performance.md", tmp_path / "x" / "gpu.json"
    page.write_text("a\n<!-- gpu -->\nold\n<!-- /gpu -->\nb\n")
    file = record(tmp_path / "a", DEVICE, step("8b, batch 1, context 512", 4.0))
    assert gpu_report.main([str(file), "--json", str(out), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("a\n<!-- gpu -->\nNVIDIA H200")
    assert text.endswith("<!-- /gpu -->\nb\n")
    assert "old" not in text
    assert json.loads(out.read_text())["figures"][1]["ms"] == 4.0
    page.write_text("no marks")
    with pytest.raises(SystemExit):
        gpu_report.main([str(file), "--page", str(page)])
    assert page.read_text() == "no marks"
    capsys.readouterr()
