"""An engine process for the tests: ``python -m tests.engine.child FD``."""

from __future__ import annotations

import sys

from jserve.engine import process
from tests.engine.fakes import build


def command(fd: int) -> list[str]:
    return [sys.executable, "-m", "tests.engine.child", str(fd)]


if __name__ == "__main__":
    process.ORPHAN_GRACE_S = 0.3
    sys.exit(process.main(int(sys.argv[1]), build))
