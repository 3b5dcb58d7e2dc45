"""One table of corner cases for the kernels beside attention: limits of a draw, places of tokens, rows of a product."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

F8 = jnp.float8_e4m3fn
NEG = -np.inf

LIMITS: dict[str, tuple[float, int, float, float]] = {
    # temperature, top_k, top_p, min_p
    "no limit": (1.0, 0, 1.0, 0.0),
    "one token": (1.0, 1, 1.0, 0.0),
    "few": (0.7, 50, 1.0, 0.0),
    "nearly all": (1.0, 2900, 1.0, 0.0),
    "more than there are": (1.0, 10**6, 1.0, 0.0),
    "nucleus": (1.0, 0, 0.9, 0.0),
    "tiny nucleus": (1.3, 0, 1e-4, 0.0),
    "nearly whole nucleus": (0.5, 0, 0.99999, 0.0),
    "floor": (1.0, 0, 1.0, 0.05),
    "everything at once": (0.8, 200, 0.7, 0.01),
    "floor above the k-th": (2.0, 1000, 0.95, 0.3),
    "hot": (50.0, 0, 0.5, 0.0),
}


def logits(kind: str, V: int, seed: int = 0) -> np.ndarray:
    """float32[V] of one row."""
    rng = np.random.default_rng([seed, V])
    x = rng.standard_normal(V).astype(np.float32) * 3
    if kind == "peaked":
        x[rng.permutation(V)[:40]] += 15
    if kind == "ramp":  # stretches of all levels, most of which a search leaves behind
        x = x / 6 + rng.permutation(V // 300 + 1).repeat(300)[:V].astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    if kind == "masked":
        x[rng.random(V) < 0.7] = NEG
    if kind == "one left":
        x[1:] = NEG
    if kind == "equal":
        x[:] = 2.5
    if kind == "banned":
        x[: V // 2] -= 1e30
    if kind == "last is best":
        x[-1] = 99
    return x


LOGITS = (
    "normal",
    "peaked",
    "ramp",
    "ties",
    "masked",
    "one left",
    "equal",
    "banned",
    "last is best",
)

HEADS: dict[str, dict] = {
    "1b": {"K": 2, "G": 4, "H": 64},
    "8b, norms": {"K": 2, "G": 4, "H": 128, "norms": True},
    "bias, odd groups": {"K": 1, "G": 7, "H": 128, "bias": True},
    "one kv head": {"K": 1, "G": 2, "H": 64, "norms": True, "bias": True},
    "wide heads": {"K": 2, "G": 1, "H": 256},
    "partial sums": {"K": 2, "G": 4, "H": 128, "S": 4, "norms": True, "bias": True, "q_rows": 8},
    "float16": {"K": 1, "G": 2, "H": 64, "dtype": jnp.float16},
    "8 bits": {"K": 2, "G": 4, "H": 64, "dtype": F8, "norms": True},
    "8 bits, padded queries": {"K": 1, "G": 8, "H": 128, "dtype": F8, "q_rows": 16},
}
PLACES = ((3, 15), (3, 0), (-1, 5), (0, 7), (-1, 0), (4, 8))
"""(page, offset) of each token; a negative page is padding."""

PRODUCTS: dict[str, dict] = {
    # rows, N, D, kind, group of inputs that share a scale, zeros, scales of x, tuning
    "one row": {"rows": 1, "N": 128, "D": 256, "kind": "int4", "group": 128},
    "a full tile": {"rows": 16, "N": 128, "D": 512, "kind": "int4", "group": 64, "zeros": True},
    "the most": {"rows": 64, "N": 128, "D": 512, "kind": "int4", "group": 128, "zeros": True},
    "odd outputs": {"rows": 9, "N": 133, "D": 512, "kind": "int4", "group": 128},
    "least outputs": {"rows": 3, "N": 65, "D": 192, "kind": "int4", "group": 32},
    "half a unit": {"rows": 2, "N": 64, "D": 704, "kind": "int4", "group": 64},
    "a scale a row": {"rows": 5, "N": 64, "D": 768, "kind": "int4", "group": 768},
    "groups of two steps": {"rows": 5, "N": 64, "D": 1024, "kind": "int4", "group": 512},
    "unsigned": {"rows": 16, "N": 70, "D": 256, "kind": "uint4", "group": 32},
    "unsigned, 64": {"rows": 64, "N": 64, "D": 256, "kind": "uint4", "group": 32},
    "floats in 32": {"rows": 1, "N": 64, "D": 256, "kind": "e2m1", "group": 32},
    "floats in 16": {"rows": 64, "N": 64, "D": 256, "kind": "e2m1", "group": 16},
    "bytes": {"rows": 16, "N": 64, "D": 384, "kind": "int8", "group": 32, "zeros": True},
    "bytes, one row": {"rows": 1, "N": 128, "D": 256, "kind": "int8", "group": 16},
    "8-bit floats": {"rows": 64, "N": 130, "D": 256, "kind": "e4m3", "group": 128},
    "8-bit floats, x scaled": {
        "rows": 9,
        "N": 64,
        "D": 512,
        "kind": "e4m3",
        "group": 128,
        "x_scales": True,
    },
    "uneven splits": {
        "rows": 3,
        "N": 64,
        "D": 640,
        "kind": "int4",
        "group": 128,
        "zeros": True,
        "tune": {"depth": 128, "warpgroups": 1, "splits": 2},
    },
    "splits of one step": {
        "rows": 3,
        "N": 64,
        "D": 512,
        "kind": "e2m1",
        "group": 32,
        "tune": {"depth": 128, "warpgroups": 1, "splits": 4, "stages": 2},
    },
    "a ring that goes round": {
        "rows": 3,
        "N": 64,
        "D": 1280,
        "kind": "int4",
        "group": 128,
        "zeros": True,
        "tune": {"depth": 128, "warpgroups": 1, "stages": 2, "splits": 1},
    },
    "three warpgroups": {
        "rows": 2,
        "N": 192,
        "D": 512,
        "kind": "int4",
        "group": 64,
        "tune": {"warpgroups": 3},
    },
}
