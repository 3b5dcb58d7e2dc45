"""An engine process for the tests: ``python -m tests.engine.child FD [MODEL]``."""

from __future__ import annotations

import sys

from jserve.engine.process import main
from tests.engine.fakes import build


def command(fd: int) -> list[str]:
    return [sys.executable, "-m", "tests.engine.child", str(fd)]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), build))
