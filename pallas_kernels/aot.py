"""Compile for an H200 on a machine without one, and read what the compiler says of the result.

It owns the description of the device and the report. Needs jax 0.11's CUDA plugin wheels (no GPU, no driver);
``available()`` says whether they are there. Nothing here runs a kernel: a report proves that code becomes machine
code of sm_90a without spills, not that it is right or fast::

    report = compile_for(f, jax.ShapeDtypeStruct((64, 128), jnp.bfloat16), donate=(0,))
    report.spills, report.smem_bytes, report.temp_bytes, report.copies(min_bytes=1 << 20)
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.hlo import BYTES, Module

SMEM_LIMIT = 232448
"""Bytes of shared memory that one block may have on sm_90."""

_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" device_address_bits: 64
  runtime_version: "13.0.0" driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""

_COPYING = "copy|copy-start|dynamic-slice|dynamic-update-slice|concatenate|scatter|transpose"
_OP = re.compile(r"%\S+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The report of ptxas on one Mosaic kernel."""

    name: str
    registers: int
    """Per thread, at launch."""
    spill_bytes: int
    stack_bytes: int
    threads: int
    """Of a block."""
    budgets: tuple[tuple[str, int], ...]
    """Every ``setmaxnreg`` of its PTX, in order: ("inc" or "dec", registers per thread)."""
    ptx: str = field(default="", repr=False)
    """The text that ptxas got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One compiled program. ``temp_bytes`` and ``alias_bytes`` are XLA's; ``smem_bytes`` is the
    largest block's, barriers included."""

    kernels: tuple[Kernel, ...]
    ignored: tuple[str, ...]
    """The directives that ptxas reports as not honoured."""
    smem_bytes: int
    narrow_reads: int
    """Instructions of Mosaic kernels that read less than 32 bits of shared memory: a thread that does
    so many times where it could read whole registers."""
    temp_bytes: int
    alias_bytes: int
    hlo: str
    thunks: str
    """XLA's listing of what a run executes, in order, nested by indentation."""
    flops: float
    """XLA's count, all branches included; what a Mosaic kernel does is not in it."""

    @property
    def spills(self) -> int:
        """Bytes spilled by all Mosaic kernels."""
        return sum(k.spill_bytes for k in self.kernels)

    def copies(self, min_bytes: int) -> list[str]:
        """Instructions that write at least ``min_bytes`` and only move data: ``op type[shape]``.
        Those inside a fusion count by the fusion's own result, not here."""
        found = []
        for dtype, dims, op in _OP.findall(self._top_level()):
            size = math.prod(int(d) for d in dims.split(",") if d) * BYTES.get(dtype, 1)
            if size >= min_bytes and re.fullmatch(_COPYING, op):
                found.append(f"{op} {dtype}[{dims}]")
        return found

    def launches(self) -> list[str]:
        """The thunks that the host starts one after another, as XLA names it: kCommandBuffer is a CUDA graph,
        kConditional and kWhile make the host wait for a value unless they are inside one."""
        return re.findall(r"^\d+: (k\w+)", self.thunks, re.M)

    def nodes(self) -> int:
        """Kernels, copies and library calls of one run, those of untaken branches included."""
        inner = {"kCommandBuffer", "kConditional", "kWhile", "kDynamicSliceFusion"}
        return sum(k not in inner for k in re.findall(r"^ *\d+: (k\w+)", self.thunks, re.M))

    def sorts(self) -> list[int]:
        """Of every sort of the program, how many numbers it puts in order at once."""
        sizes = re.findall(r"= \(?\w+\[(?:\d+,)*(\d+)\].* sort\(", self.hlo)
        return [int(n) for n in sizes]

    def collectives(self) -> list[str]:
        """Names of the collectives, in order."""
        names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
        return re.findall(rf"= .*? ({names})(?:-start)?\(", self.hlo)

    @property
    def module(self) -> Module:
        """The program's instructions, to ask who reads what."""
        return Module(self.hlo)

    def _top_level(self) -> str:
        """The text without the bodies of fusions."""
        blocks = re.split(r"\n(?=(?:ENTRY )?%\S+ \()", self.hlo)
        return "\n".join(
            b for b in blocks if not re.match(r"%(fused|wrapped|region|\S*_comput)", b)
        )


@lru_cache
def available() -> str | None:
    """None if this process can compile for an H200, else the reason why not.

    The plugin must have been told not to ask for cuDNN and a driver before jax started:
    ``JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1``.
    """
    if os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1":
        return "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 is not set"
    try:
        h200(1)
    except Exception as error:
        return f"no CUDA plugin that compiles without a device: {error}"
    return None


@lru_cache
def h200(n: int = 1) -> tuple[Any, ...]:
    """``n`` described H200s: devices to compile for, which run nothing."""
    jax.devices()  # registers the plugins
    topology = topologies.get_topology_desc(
        topology_name="h200", platform="cuda", topology=f"1x1x{n}", target_config=_TARGET
    )
    return tuple(topology.devices)


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> Report:
    """Compile ``fn`` of ``jax.ShapeDtypeStruct`` trees for an H200.

    Arguments without a sharding are placed on one device.
    """
    where = SingleDeviceSharding(h200(1)[0])

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if x.sharding else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    placed = jax.tree.map(place, args)
    jitted = jax.jit(fn, donate_argnums=donate)
    with tempfile.TemporaryDirectory() as dump, _mosaic_says() as said:
        lowered = jitted.trace(*placed).lower(lowering_platforms=("cuda",))
        asked = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True, **(options or {})}
        compiled = lowered.compile(asked)
        # XLA writes the list before and after it gathers launches into graphs.
        lists = [p for p in Path(dump).glob("*thunk_sequence*") if "after" in p.name]
        thunks = "".join(p.read_text() for p in sorted(lists))
    return _report(compiled, said(), thunks)


def _report(compiled: Any, said: str, thunks: str) -> Report:
    memory = compiled.memory_analysis()
    return Report(
        kernels=_kernels(said),
        # C7519: ptxas adds a fence to a loop of products by itself, one instruction a round.
        ignored=tuple(re.findall(r".*(?:C75(?!19)\d\d|setmaxnreg ignored).*", said)),
        smem_bytes=_smem_bytes(said),
        narrow_reads=len(re.findall(r"\bld\.shared\.[bsuf](?:8|16)\b", said)),
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        hlo=re.sub(r", backend_config=\{kernel_hash.*", "", compiled.as_text()),
        thunks=thunks,
        flops=_flops(compiled),
    )


def _flops(compiled: Any) -> float:
    """A described device has no cost analysis; the same analysis of its HLO needs any client."""
    xla: Any = importlib.import_module("jaxlib._jax")
    client = jax.local_devices(backend="cpu")[0].client
    module = compiled.runtime_executable().hlo_modules()[0]
    return xla.hlo_module_cost_analysis(client, module).get("flops", 0.0)


def _smem_bytes(said: str) -> int:
    """Of the largest block: scratch, and 8 bytes a barrier."""
    blocks = [0]
    for resources in re.findall(r"^Resources\(.*$", said, re.M):
        barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
        scratch = re.findall(r"smem_scratch_bytes=(\d+)", resources)[0]
        blocks.append(int(scratch) + 8 * sum(int(n) * int(times) for n, times in barriers))
    return max(blocks)


def _kernels(said: str) -> tuple[Kernel, ...]:
    """Mosaic compiles one kernel after another and prints the PTX of each before what ptxas says of it."""
    ptxas = (
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    infos = re.findall(ptxas, said, re.S)
    sources = re.split(r"^\.visible \.entry ", said, flags=re.M)[1:]
    if len(sources) != len(infos):
        raise ValueError(
            f"{len(infos)} kernels were assembled, but PTX of {len(sources)} was printed"
        )
    return tuple(
        Kernel(
            name=name,
            registers=int(registers),
            spill_bytes=int(stores) + int(loads),
            stack_bytes=int(stack),
            threads=int(re.findall(r"^\.maxntid (\d+)", ptx, re.M)[0]),
            budgets=tuple(
                (action, int(n))
                for action, n in re.findall(r"setmaxnreg\.(inc|dec)\S* (\d+);", ptx)
            ),
            ptx=ptx.partition("\n}\n")[0],
        )
        for (name, stack, stores, loads, registers), ptx in zip(infos, sources, strict=True)
    )


@contextlib.contextmanager
def _mosaic_says() -> Iterator[Callable[[], str]]:
    """Collects the output of the Mosaic compiler meanwhile: its Python to sys.stdout, its C++ to the process's
    own streams."""
    wanted = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES", "MOSAIC_GPU_DUMP_PTX")
    before = {k: os.environ.get(k) for k in wanted}
    os.environ.update(dict.fromkeys(wanted, "1"))
    with tempfile.TemporaryDirectory() as folder:
        path, python = Path(folder) / "said", io.StringIO()
        said = {"text": ""}
        with (
            path.open("wb") as sink,
            _streams_to(sink.fileno()),
            contextlib.redirect_stdout(python),
        ):
            yield lambda: said["text"]
        said["text"] = python.getvalue() + path.read_text(errors="replace")
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _streams_to(target: int) -> Iterator[None]:
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    try:
        for fd, _ in kept:
            os.dup2(target, fd)
        yield
    finally:
        for fd, saved in kept:
            os.dup2(saved, fd)
            os.close(saved)
