"""GB/s at which one thread writes pages of KV for other replicas, and reads theirs, where both share a directory.

It owns the timing of ``runner.disk``: checksum, file, rename. Nothing else runs.

    python -m bench.page_files [--directory /dev/shm] [--mib 0.25,4,16] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.probe import record
from jserve.runner.disk import DiskStore

BYTES = 256 << 20
"""In all files of one round."""


def measured(directory: Path, mib: float, repeats: int) -> dict[str, Any]:
    """The median GB/s of ``repeats`` rounds with pages of ``mib`` MiB."""
    n_bytes = int(mib * 2**20)
    page, names = os.urandom(n_bytes), [os.urandom(16) for _ in range(max(1, BYTES // n_bytes))]
    total, write_gb_s, read_gb_s = len(names) * n_bytes / 1e9, [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=directory) as root:
            store = DiskStore(Path(root), "0" * 16, page_bytes=n_bytes, max_bytes=2 * BYTES + 2**20)
            began = time.perf_counter()
            written = [store.put(digest, page) for digest in names]
            half = time.perf_counter()
            read = [store.get(digest) is not None for digest in names]
            ended = time.perf_counter()
            assert all(written + read), "a page could not be moved"
            write_gb_s.append(total / (half - began))
            read_gb_s.append(total / (ended - half))
    rates = {"write_gb_s": write_gb_s, "read_gb_s": read_gb_s}
    return {"mib": mib, **{name: round(statistics.median(v), 2) for name, v in rates.items()}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--mib", default="0.25,4,16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = [measured(args.directory, float(mib), args.repeats) for mib in args.mib.split(",")]
    table = Table(*rows[0], title=f"pages in {args.directory}")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if args.json is not None:
        options = {"directory": str(args.directory), "repeats": args.repeats}
        report.write(record("page_files", options, rows), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
