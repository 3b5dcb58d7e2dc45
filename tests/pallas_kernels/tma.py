"""TMA descriptors as Mosaic makes them, checked by the rules of the CUDA driver.

A descriptor is made on the host when a kernel is launched; one that the driver refuses ends the process, and
no compile without a device runs that code. So the descriptors of a compile are recorded here.

Source of the rules: CUDA driver API, ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.experimental.mosaic.gpu import launch_context, utils

MAX_RANK, MAX_BOX, MAX_SIZE, MAX_STRIDE = 5, 256, 1 << 32, 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """One array as TMA sees it, outermost dimension first; ``strides`` count elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    bits: int
    """Of an element."""
    swizzle: int
    """Bytes; 0 or 16 for none."""

    def faults(self) -> list[str]:
        """The rules that it breaks, in words."""
        rank, inner = len(self.sizes), self.box[-1] * self.bits // 8
        outer = [s * self.bits // 8 for s in self.strides[:-1]]
        rules = {
            f"rank {rank} is not 1 to {MAX_RANK}": not 1 <= rank <= MAX_RANK,
            f"box {self.box} has another rank": len(self.box) != rank,
            f"a size of {self.sizes} is not 1 to 2**32": not all(
                0 < n <= MAX_SIZE for n in self.sizes
            ),
            f"a side of the box {self.box} is not 1 to {MAX_BOX}": not all(
                0 < n <= MAX_BOX for n in self.box
            ),
            f"the innermost stride is {self.strides[-1]}": self.strides[-1] != 1,
            f"strides of {outer} bytes: not all multiples of 16": any(s % 16 for s in outer),
            f"strides of {outer} bytes: not all below 2**40": any(s >= MAX_STRIDE for s in outer),
            f"the box is {inner} bytes wide: not a multiple of 16": inner % 16 != 0,
            f"the box is {inner} bytes wide, the swizzle {self.swizzle}": self.swizzle > 16
            and inner > self.swizzle,
        }
        return [rule for rule, broken in rules.items() if broken]


class _Memref:
    """The dialect module, whose strided metadata is asked for once per descriptor."""

    def __init__(self, module: Any, types: list[Any]):
        self._module, self._types = module, types

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def extract_strided_metadata(self, ref: Any) -> Any:
        self._types.append(ref.type)
        return self._module.extract_strided_metadata(ref)


@contextlib.contextmanager
def recorded() -> Iterator[list[Descriptor]]:
    """Collect the descriptors of all kernels that are lowered meanwhile."""
    found: list[Descriptor] = []
    context, memref = launch_context.LaunchContext, launch_context.memref
    original = context._get_tma_desc
    alloc = context._alloc_scratch

    def get(self: Any, ref: Any, transform: Any, peer: Any, box: Any, swizzle: Any, op: Any) -> Any:
        def alloc_recorded(size: int, host_init: Any, **options: Any) -> Any:
            def init(pointer: Any) -> None:
                types: list[Any] = []
                launch_context.memref = _Memref(memref, types)
                try:
                    host_init(pointer)
                finally:
                    launch_context.memref = memref
                found.append(_descriptor(types[-1], box, swizzle))

            return alloc(self, size, host_init=init, **options)

        self._alloc_scratch = alloc_recorded
        try:
            return original(self, ref, transform, peer, box, swizzle, op)
        finally:
            del self._alloc_scratch

    context._get_tma_desc = get
    try:
        yield found
    finally:
        context._get_tma_desc = original


def _descriptor(type_: Any, box: tuple[int, ...], swizzle: int | None) -> Descriptor:
    memref_type = launch_context.ir.MemRefType(type_)
    strides, _ = memref_type.get_strides_and_offset()
    return Descriptor(
        sizes=tuple(memref_type.shape),
        strides=tuple(strides),
        box=tuple(box),
        bits=utils.bitwidth(memref_type.element_type),
        swizzle=int(swizzle or 0),
    )
