"""The types of tensors in GGUF files: numbers of a block, and bytes of one."""

from __future__ import annotations

PLAIN = {"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2)}
QUANTISED = {
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
}
"""Name -> (number in a file, numbers of a block, bytes of a block)."""
READ = PLAIN | QUANTISED
BY_NUMBER = {number: name for name, (number, _, _) in READ.items()}
OTHERS = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Types that are not read, for errors to name."""


def n_bytes(kind: str, n: int) -> int:
    """Bytes of ``n`` numbers, a multiple of a block."""
    _, block, size = READ[kind]
    return n // block * size


def block_of(kind: str) -> int:
    """Numbers of a block."""
    return READ[kind][1]
