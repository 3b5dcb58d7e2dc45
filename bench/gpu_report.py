"""The records of ``bench.gpu`` as one result file, and as the table of docs/performance.md.

It owns which figures the table shows and what they are held against.

    python -m bench.gpu_report gpu.jsonl... [--json bench/results/DATE-h200-gpu.json] [--page docs/performance.md]

Records of several calls are one: of a figure measured twice the later file's counts. Figures of
``--tiny`` are refused, since they mean nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.gpu_record import read

FORMAT = 1
BEGIN, END = "<!-- gpu -->", "<!-- /gpu -->"
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of ``stage`` whose names match ``pattern``, shown as ``cells`` says."""

    stage: str
    pattern: str
    cells: Callable[[Line], tuple[str, str]]
    """(figure, share of the limit)."""


def _step(x: Line) -> tuple[str, str]:
    return f"{x['ms']:.2f} ms, {x['tok_per_s']:,.0f} tok/s", f"{x['share']:.0%}"


def _verified(x: Line) -> tuple[str, str]:
    rates = ", ".join(
        f"{x[f'tok_per_s_at_{n}']:,.0f}" for n in (2, 3, 4) if f"tok_per_s_at_{n}" in x
    )
    return f"{x['over_decode']:.2f} x a decode step; tok/s where 2, 3, 4 stand: {rates}", ""


def _rate(x: Line) -> tuple[str, str]:
    share = f"{x['share']:.0%}" if "share" in x else ""
    if "tflops" in x:
        return f"{x['us']:,.0f} us, {x['tflops']:.0f} TFLOP/s", share
    return f"{x['us']:,.1f} us, {x['bytes_per_s'] / 1e12:.2f} TB/s", share


def _beside_xla(x: Line) -> tuple[str, str]:
    if "us" not in x:
        return f"{x['verdict']}, least {x['least']:.2f}" if "least" in x else x["verdict"], ""
    times = f"{x['us']:,.1f} us, XLA ({x['xla']}) {x['xla_us']:,.1f} us"
    share = f"{x['share']:.0%}" if "share" in x else ""
    return f"{times}: {x['ratio']:.2f} x, {x['verdict']}", share


def _beside_cublaslt(x: Line) -> tuple[str, str]:
    rates = f"{x['bytes_per_s'] / 1e12:.2f} TB/s, {x['tflops']:.0f} TFLOP/s"
    beside = f"cuBLASLt ({x['cublaslt']}) {x['cublaslt_us']:,.1f} us: {x['ratio']:.2f} x"
    return f"{x['us']:,.1f} us, {rates}; {beside}", f"{x['share']:.0%}"


def _bandwidth(x: Line) -> tuple[str, str]:
    return f"{x['bytes_per_s'] / 1e12:.2f} TB/s", ""


def _matmul(x: Line) -> tuple[str, str]:
    return f"{x['tflops']:.0f} TFLOP/s", ""


def _loop(x: Line) -> tuple[str, str]:
    return f"{x['tok_per_s']:,.0f} tok/s", ""


def _served(x: Line) -> tuple[str, str]:
    latencies = f"TTFT {x['ttft_p50_ms']:.0f} ms, ITL {x['itl_p50_ms']:.1f} ms"
    beside = f", {x['over_plain']:.2f} x without drafts" if "over_plain" in x else ""
    return f"{x['output_tok_s']:,.0f} tok/s, {latencies}{beside}", ""


ROWS = (
    Row("facts", r"(read|copy) bandwidth", _bandwidth),
    Row("facts", r"matmul .*", _matmul),
    Row("steps_8b", r"8b, (batch .*|mixed .*)", _step),
    Row("steps_8b_kv8", r"8b, (batch .*|mixed .*)", _step),
    Row("steps_8b_kv_int8", r"8b, (batch .*|mixed .*)", _step),
    Row("steps_8b_fp8", r"8b, (batch .*|mixed .*)", _step),
    Row("steps_8b_int4", r"8b, (batch .*|mixed .*)", _step),
    Row("steps_1b", r"1b, (batch .*|mixed .*)", _step),
    Row("graphs", r"1b, .*", _step),
    Row("verify", r"8b, .* (verify|tree) of \d+", _verified),
    Row("decode_times", r".*", _rate),
    Row("prefill_times", r".*", _rate),
    Row("mla_times", r".*", _rate),
    Row("attention_peers", r".*", _rate),
    Row("steps_30b_a3b", r"30b-a3b, (batch .*|mixed .*)", _step),
    Row("steps_v2_lite", r"v2-lite, (batch .*|mixed .*)", _step),
    Row("experts_times", r".*", _rate),
    Row("products_times", r".*", _beside_xla),
    Row("gemm_times", r".*", _beside_cublaslt),
    Row("candidate_times", r".*", _beside_xla),
    Row("serving", r".*/.*@\d+|S1", _served),
    Row("serving_speculative", r".*/.*@\d+|S1", _served),
    Row("peers", r".*", _loop),
)
NUMERICS = (
    "decode_numerics",
    "prefill_numerics",
    "mla_numerics",
    "step_numerics",
    "experts_numerics",
    "products_numerics",
    "gemm_numerics",
    "candidate_numerics",
)


def merged(files: Sequence[Path]) -> list[Line]:
    """The figures of all files in order of first appearance, later ones in place of earlier.

    Raises:
        ValueError: a file has none, or figures of ``--tiny``.
    """
    found: dict[tuple[str, ...], Line] = {}
    for file in files:
        lines = read(file)
        if not lines:
            raise ValueError(f"{file}: no figures")
        if any(x.get("tiny") for x in lines):
            raise ValueError(f"{file}: figures of --tiny mean nothing")
        found |= {(x["stage"], x["name"], *_how(x)): x for x in lines}
    return list(found.values())


def markdown(lines: Sequence[Line]) -> str:
    """The table of a page; a figure that failed or was skipped is not in it, but counted below."""
    table = ["| | measured | of the limit |", "|---|---|---|"]
    for row in ROWS:
        for x in lines:
            if x["stage"] == row.stage and re.fullmatch(row.pattern, x["name"]) and _is_whole(x):
                figure, share = row.cells(x)
                by = "".join(f", {kind}" for kind in _how(x))
                table.append(f"| {row.stage}: {x['name']}{by} | {figure} | {share} |")
    return "\n".join([_head(lines), "", *table, "", *_below(lines)])


def _how(x: Line) -> tuple[str, ...]:
    """What else than the engine's own made a figure: another attention, products of quantised weights by XLA."""
    ran = x.get("ran", x.get("attn", "hopper"))
    attn = () if ran == "hopper" else (f"attention {ran}",)
    return attn if x.get("kernels", "hopper") == "hopper" else (*attn, "products by XLA")


def _is_whole(x: Line) -> bool:
    return x["name"] != "end" and "error" not in x and "skipped" not in x


def _head(lines: Sequence[Line]) -> str:
    device = next((x for x in lines if (x["stage"], x["name"]) == ("facts", "device")), {})
    versions = [f"{k} {v}" for k, v in device.items() if k in ("jax", "torch")]
    return ", ".join([device.get("kind", "unknown device"), *versions])


def _below(lines: Sequence[Line]) -> Iterator[str]:
    judged = [x for x in lines if x["stage"] in NUMERICS and "ok" in x]
    right = sum(bool(x["ok"]) for x in judged)
    yield f"Numerics: {right} of {len(judged)} comparisons within bounds."
    failed = [f"{x['stage']}: {x['name']}" for x in lines if "error" in x]
    if failed:
        yield f"Failed: {'; '.join(failed)}."


def into_page(page: Path, table: str) -> None:
    """Put ``table`` between the marks of ``page``.

    Raises:
        ValueError: it has no marks.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no {BEGIN} ... {END}")
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.gpu_report", description=ABOUT)
    p.add_argument("files", nargs="+", type=Path, help="gpu.jsonl of each call, oldest first")
    p.add_argument("--json", type=Path, help="result file to write")
    p.add_argument("--page", type=Path, help="file whose table is replaced")
    args = p.parse_args(argv)
    try:
        lines = merged(args.files)
        table = markdown(lines)
        if args.page:
            into_page(args.page, table)
    except (OSError, ValueError) as e:
        p.error(str(e))
    if args.json:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        head = {"format": FORMAT, "kind": "gpu", "date": date, "device": _head(lines)}
        report.write({**head, "figures": lines}, args.json)
    sys.stdout.write(table + "\n")
    return 0


ABOUT = "Show, keep and publish what bench.gpu measured."

if __name__ == "__main__":
    sys.exit(main())
