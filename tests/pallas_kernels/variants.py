"""One table of what the attention kernels serve: each row is proved in the interpreter and compiled for
sm_90a, by decode rows and by prefill chunks (those with a tree by decode rows alone).

``test_variants`` checks that no value of an axis and no pair that can hold is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.paged_attention import Tree

BF16, F16, F8, I8 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8
BRANCHES = Tree.of((-1, 0, 0, 1, 1, 2))
BINARY = Tree.of((-1, *((j - 1) // 2 for j in range(1, 16))))
LEVEL = Tree(
    sees=(
        (True, False, False, True, False, False),
        (False, True, False, False, True, False),
        (True, False, False, False, False, True),
    ),
    depth=(0, 0, 0, 1, 1, 1),
)
"""Three nodes of one depth, and above them three of which two have children: what a drafter runs."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    H: int
    G: int
    Z: int
    K: int = 8
    J: int = 1
    dtype: Any = BF16
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    tree: Tree | None = None

    @property
    def tokens(self) -> int:
        """Query tokens of a decode row."""
        return len(self.tree.sees) if self.tree else self.J

    @property
    def static(self) -> dict[str, Any]:
        return {"window": self.window, "soft_cap": self.soft_cap}


VARIANTS: dict[str, Variant] = {
    "1b": Variant(H=64, G=4, Z=64),
    "8b": Variant(H=128, G=4, Z=64),
    "8b verify": Variant(H=128, G=4, Z=32, J=4, window=50),
    "7b, odd groups": Variant(H=128, G=7, Z=16, K=4, soft_cap=3.0),
    "70b on 8 devices": Variant(H=128, G=8, Z=64, K=1, sinks=True),
    "16 heads, 16 tokens": Variant(
        H=64, G=16, Z=128, K=2, J=16, window=70, soft_cap=3.0, sinks=True
    ),
    "one head, float16": Variant(H=64, G=1, Z=8, dtype=F16, window=9, sinks=True),
    "8b, small pages": Variant(H=128, G=4, Z=8, window=9, sinks=True),
    "8b, float16": Variant(H=128, G=4, Z=128, J=2, dtype=F16, soft_cap=3.0),
    "wide": Variant(H=256, G=2, Z=64, K=4),
    "wide, everything": Variant(H=256, G=8, Z=32, K=2, J=4, window=70, soft_cap=3.0, sinks=True),
    "wide, float16": Variant(H=256, G=1, Z=16, K=4, J=2, dtype=F16),
    "1b, 8 bits": Variant(H=64, G=4, Z=64, dtype=F8),
    "8b, 8 bits": Variant(H=128, G=4, Z=64, J=4, dtype=F8),
    "8 bits, small pages": Variant(H=128, G=5, Z=8, K=3, dtype=F8, sinks=True),
    "8 bits, large pages": Variant(H=64, G=2, Z=128, J=3, dtype=F8, soft_cap=3.0),
    "8 bits, everything": Variant(
        H=128, G=8, Z=32, K=1, J=2, dtype=F8, window=70, soft_cap=3.0, sinks=True
    ),
    "1b, int8": Variant(H=64, G=4, Z=64, dtype=I8),
    "8b, int8": Variant(H=128, G=4, Z=64, J=4, dtype=I8),
    "int8, small pages": Variant(H=128, G=5, Z=32, K=3, dtype=I8, sinks=True),
    "int8, large pages": Variant(H=64, G=2, Z=128, J=3, dtype=I8, soft_cap=3.0),
    "int8, everything": Variant(
        H=128, G=8, Z=32, K=1, J=2, dtype=I8, window=70, soft_cap=3.0, sinks=True
    ),
    "tree": Variant(H=64, G=2, Z=16, tree=BRANCHES, window=2),
    "tree of 16": Variant(H=128, G=4, Z=64, tree=BINARY, sinks=True),
    "tree, float16": Variant(H=64, G=8, Z=32, K=4, dtype=F16, tree=BRANCHES, soft_cap=3.0),
    "tree, 8 bits": Variant(H=64, G=1, Z=16, dtype=F8, tree=LEVEL, window=40),
    "tree of 16, 8 bits, everything": Variant(
        H=128, G=8, Z=16, K=1, dtype=F8, tree=BINARY, window=70, soft_cap=3.0, sinks=True
    ),
    "tree, int8": Variant(H=64, G=1, Z=32, dtype=I8, tree=LEVEL, window=40),
    "tree of 16, int8, everything": Variant(
        H=128, G=8, Z=64, K=1, dtype=I8, tree=BINARY, window=70, soft_cap=3.0, sinks=True
    ),
    "tree, window": Variant(H=128, G=8, Z=16, K=4, tree=BINARY, window=20),
    "level": Variant(H=128, G=4, Z=128, tree=LEVEL, window=3),
}
CHAINS = {name: v for name, v in VARIANTS.items() if v.tree is None}
