"""Reads the optimised HLO of a compiled program: who reads a parameter, and how many bytes a run moves.

It owns the little of the text format that needs. Only the entry computation is looked at: an instruction there is a
kernel, a copy or a call, and what happens inside a fusion stays on the chip. Branches and loops count as not taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

BYTES: dict[str, float] = {
    "s4": 0.5,
    "u4": 0.5,
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}

FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "conditional", "while"}
"""Move nothing themselves."""
PICKING = {"gather", "dynamic-slice"}
"""Read of their first operand only what they give."""
IN_PLACE = {"scatter", "dynamic-update-slice"}
"""Write into their first operand's buffer only what their other operands bring."""
_SAME_BUFFER = {"bitcast", "get-tuple-element", "tuple"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    name: str
    op: str
    n_bytes: int
    """Of the result, all parts of a tuple."""
    operands: tuple[str, ...]
    calls: str
    """The computation of a fusion, else empty."""
    label: str
    """A parameter's path in the program's arguments, e.g. ``params['embed']``."""
    scope: str
    """The place in the traced program that its result comes from, e.g. ``jit(f)/layer0/add``."""
    is_root: bool
    in_place: dict[int, int]
    """Of a kernel's results the numbers of those that are an operand's buffer -> that operand's."""
    index: int
    """Of a tuple's part; -1: it takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One instruction that a run executes, and the bytes it reads and writes in device memory."""

    name: str
    op: str
    """The op that a fusion ends in, or the instruction's own."""
    scope: str
    read: int
    written: int
    reads: tuple[str, ...]
    """Paths of the parameters that it reads."""
    depth: int
    """Instructions on the longest way of results into this one, itself included."""


class Module:
    """The text of one compiled program (``compiled.as_text()``)."""

    def __init__(self, text: str) -> None:
        self._blocks = dict(_computations(text))
        self.entry = _instructions(self._blocks["ENTRY"])

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.entry}

    def reads(self, label: str) -> dict[str, int]:
        """Parameters whose path begins with ``label`` -> instructions that read them, views apart."""
        owner = {i.name: i.label for i in self.entry if i.label.startswith(label)}
        found = dict.fromkeys(owner.values(), 0)
        for i in self.entry:
            touched = {owner[x] for x in i.operands if x in owner}
            if i.op in _SAME_BUFFER:
                owner |= dict.fromkeys([i.name], *touched) if len(touched) == 1 else {}
            else:
                for name in touched:
                    found[name] += 1
        return found

    def bytes_read(self, label: str) -> dict[str, int]:
        """Parameters whose path begins with ``label`` -> bytes that a run reads of them, where instructions only pick
        from them what they pick."""
        owner = {i.name: i.label for i in self.entry if i.label.startswith(label)}
        found = dict.fromkeys(owner.values(), 0)
        for i in self.entry:
            touched = {owner[x] for x in i.operands if x in owner}
            if i.op in _SAME_BUFFER:
                owner |= dict.fromkeys([i.name], *touched) if len(touched) == 1 else {}
                continue
            for at, name in enumerate(i.operands):
                if name in owner and name not in i.operands[:at]:
                    picked = _picked(self._inside(i), at)
                    found[owner[name]] += self._by_name[name].n_bytes if picked is None else picked
        return found

    def size(self, label: str) -> int:
        """Bytes of the parameter with that path."""
        return next(i.n_bytes for i in self.entry if i.label == label)

    def moved(self, apart: str) -> int:
        """Bytes that one run reads and writes in device memory, each operand of each instruction
        once. Parameters whose path begins with ``apart``, and what is written into them, count
        nothing: how much of a KV pool a kernel visits is not in its shape."""
        return sum(p.read + p.written for p in self.passes(apart))

    def passes(self, apart: str) -> list[Pass]:
        """The instructions that a run executes, in order; ``apart`` as of ``moved``."""
        pools = {i.name for i in self.entry if i.label.startswith(apart)}
        depth: dict[str, int] = {}
        labels: dict[str, str] = {}
        found = []
        for i in self.entry:
            if self._is_view_of(i, pools) or self._is_pool_of_kernel(i, pools):
                pools.add(i.name)
            runs = i.op not in FREE and not i.op.endswith("-done")
            depth[i.name] = max((depth.get(x, 0) for x in i.operands), default=0) + runs
            if i.op == "parameter":
                labels[i.name] = i.label
            elif i.op in _SAME_BUFFER and i.operands and i.operands[0] in labels:
                labels[i.name] = labels[i.operands[0]]
            if runs:
                found.append(
                    Pass(
                        name=i.name,
                        op=self._root_op(i),
                        scope=i.scope,
                        read=self._read(i, pools),
                        written=self._written(i, pools),
                        reads=tuple(labels[x] for x in i.operands if x in labels),
                        depth=depth[i.name],
                    )
                )
        return found

    def _is_view_of(self, i: Instruction, pools: set[str]) -> bool:
        whole = [x for x in i.operands if x in pools and self._by_name[x].n_bytes == i.n_bytes]
        return bool(whole) and (i.op in _SAME_BUFFER or self._root_op(i) in IN_PLACE)

    def _is_pool_of_kernel(self, i: Instruction, pools: set[str]) -> bool:
        """True if this is the part of a kernel's result that it wrote into a pool."""
        kernel = self._by_name.get(i.operands[0]) if i.index >= 0 else None
        if kernel is None or i.index not in kernel.in_place:
            return False
        return kernel.operands[kernel.in_place[i.index]] in pools

    def _read(self, i: Instruction, pools: set[str]) -> int:
        inside = self._inside(i)
        total = 0
        for at, name in enumerate(i.operands):
            if name in i.operands[:at] or name in pools or name not in self._by_name:
                continue
            picked = _picked(inside, at)
            total += self._by_name[name].n_bytes if picked is None else picked
        return total

    def _written(self, i: Instruction, pools: set[str]) -> int:
        if i.name in pools or self._root_op(i) in IN_PLACE:
            return 0
        return i.n_bytes - sum(self._by_name[i.operands[at]].n_bytes for at in i.in_place.values())

    def _inside(self, i: Instruction) -> tuple[Instruction, ...]:
        return _instructions(self._blocks[i.calls]) if i.calls in self._blocks else ()

    def _root_op(self, i: Instruction) -> str:
        """The op that a fusion ends in, views apart; an instruction's own otherwise."""
        inside = {x.name: x for x in self._inside(i)}
        root = next((x for x in inside.values() if x.is_root), i)
        while root.op in ("bitcast", "copy") and root.operands[0] in inside:
            root = inside[root.operands[0]]
        return root.op


def _picked(inside: tuple[Instruction, ...], at: int) -> int | None:
    """Bytes that a fusion reads of its operand ``at`` if it only picks from it or writes into it,
    else None."""
    views = {i.name for i in inside if i.op == "parameter" and i.label == str(at)}
    if not views:
        return None
    total = 0
    for i in inside:
        used = [k for k, x in enumerate(i.operands) if x in views]
        if not used:
            continue
        if i.op == "bitcast":
            views.add(i.name)
        elif used == [0] and i.op in PICKING | IN_PLACE:
            total += i.n_bytes if i.op in PICKING else 0
        else:
            return None
    return total


def _computations(text: str) -> Iterator[tuple[str, str]]:
    """(name, lines) of each computation; the main one is called ENTRY."""
    for block in re.split(r"\n(?=(?:ENTRY )?%\S+ \()", text)[1:]:
        head, _, body = block.partition("\n")
        yield ("ENTRY" if head.startswith("ENTRY") else head.split()[0].lstrip("%")), body


def _instructions(body: str) -> tuple[Instruction, ...]:
    return tuple(filter(None, map(_instruction, body.splitlines())))


def _instruction(line: str) -> Instruction | None:
    head, equals, rest = line.strip().partition(" = ")
    if not equals or "%" not in head:
        return None
    kind, rest = _type(rest)
    op, _, rest = rest.partition("(")
    inside, rest = _until_closed(rest)
    calls = re.search(r"calls=%([\w.-]+)", rest)
    scope = re.search(r'op_name="([^"]*)"', rest)
    part = re.search(r", index=(\d+)", rest) if op == "get-tuple-element" else None
    label = scope if op == "parameter" else None
    return Instruction(
        name=head.split("%")[1],
        op=op,
        n_bytes=_size(kind),
        operands=tuple(re.findall(r"%([\w.-]+)", inside)),
        calls=calls[1] if calls else "",
        label=label[1].replace("\\'", "'") if label else inside if op == "parameter" else "",
        scope=scope[1] if scope else "",
        is_root=head.startswith("ROOT"),
        in_place=_in_place(rest),
        index=int(part[1]) if part else -1,
    )


def _in_place(attributes: str) -> dict[int, int]:
    _, found, rest = attributes.partition("output_to_operand_aliasing={")
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}\)", rest.split(", api_version")[0])
    return {int(result): int(operand) for result, operand in pairs} if found else {}


def _type(text: str) -> tuple[str, str]:
    """The result's type and what follows it."""
    if not text.startswith("("):
        kind, _, rest = text.partition(" ")
        return kind, rest
    kind, rest = _until_closed(text[1:])
    return kind, rest.lstrip()


def _until_closed(text: str) -> tuple[str, str]:
    """The text before the parenthesis that closes an open one, and the text after it."""
    depth = 1
    for at, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return text[:at], text[at + 1 :]
    return text, ""


def _size(kind: str) -> int:
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", kind)
    return sum(
        math.ceil(math.prod(int(d) for d in dims.split(",") if d) * BYTES.get(dtype, 1))
        for dtype, dims in shapes
    )
