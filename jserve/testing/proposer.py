"""A proposer that proposes nothing, for tests to subclass."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jserve.types import Request, Sequence


class FakeProposer:
    """``ports.Proposer`` that reads nothing: subclasses say what to ``propose``."""

    name = "fake"
    blind = True
    seconds = 0.0

    def check(self, request: Request) -> None: ...

    def read(self, seq: Sequence, most: int) -> int:
        return 0

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        return ()

    def mask(self, seq: Sequence, drafts: Seq[int]) -> np.ndarray | None:
        return None

    def forget(self, seq: Sequence) -> None: ...
