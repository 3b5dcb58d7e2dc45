"""Copies pages between device and host memory with two compiled programs.

It owns the host pool (numpy), the programs that gather and scatter pages, and when bytes have arrived. A gather
runs before the steps that rewrite its pages, a scatter before those that read them, because all programs run in the
order of their launch; the copy to the host goes on beside the steps and is awaited with the result of its own
step::

    launch k     gather pages -> [arrays, WIDTH pages] -- copy to host begins
                 scatter <- rows of the host pool (copied first: a later landing may rewrite them)
                 step k
    collect k    the gathered pages are written to the host pool

``WIDTH`` pages go in one program; the rest of a last one is scratch page 0. Arrays of one shape are
stacked: the target's, and apart from them a drafter's. What a page is in host memory and on disk is
the bytes of its stacks, one after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jserve.model.attention import LayerKV
from jserve.model.step import PoolArray, StepModel
from jserve.runner.compiler import Compiler
from jserve.runner.spill import Pages, Spill
from jserve.types import PageFetch, PageMove

WIDTH = 16
FORMAT = 1
"""Of the bytes of a page on disk."""
KV = list[LayerKV]
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Leaving:
    """Pages on their way to host pages ``hosts``: [arrays, WIDTH on the page axis, ...]."""

    hosts: list[int]
    digests: list[bytes]
    data: list[jax.Array]
    """One of each stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Arrays of one shape, and the pages of theirs in host memory."""

    arrays: list[tuple[int, int]]
    """(layer, number among the arrays of that layer)."""
    shape: tuple[int, ...]
    """Of one page of one array."""
    sharding: NamedSharding
    pool_H: np.ndarray
    """[host pages, arrays, ...]"""


class PageMover:
    """The host pool of one engine and its programs, compiled here.

    Args:
        model: whose KV is moved.
        n_host_pages: pages of the host pool.
        compiler: what makes the programs; by default one that keeps nothing.
    """

    def __init__(
        self, model: StepModel, n_host_pages: int, compiler: Compiler | None = None
    ) -> None:
        self.n_host_pages = n_host_pages
        self._axis = model.backend.page_axis
        self._stacks = _stacks(model, n_host_pages)
        self.page_nbytes = model.kv.host_page_bytes
        self._gather, self._scatter = self._compile(model, compiler or Compiler())
        self.spill: Spill | None = None
        """The disk writer of pages that go out; set once, before the first launch."""

    def launch(self, kv: KV, moves: Seq[PageMove]) -> tuple[KV, list[Leaving]]:
        """The KV after ``moves`` (those that go out first), and what is on its way to the host.

        Raises:
            ValueError: a page or host page that does not exist; nothing was started.
        """
        for move in moves:
            if not 0 <= move.host < self.n_host_pages:
                raise ValueError(f"host page {move.host} of {self.n_host_pages}")
        out = [move for move in moves if move.out]
        leaving = [self._take(kv, part) for part in _parts(out)]
        for part in _parts([move for move in moves if not move.out]):
            kv = self._bring(kv, part)
        return kv, leaving

    def land(self, leaving: Seq[Leaving]) -> None:
        """Wait for the pages and write them to the host pool."""
        for part in leaving:
            pages = self._by_page(part.data)
            for stack, pages_H in zip(self._stacks, pages, strict=True):
                stack.pool_H[part.hosts] = pages_H[: len(part.hosts)]
            self._write(pages, part.digests)

    def seconds_per_page(self, kv: KV, clock: Callable[[], float]) -> tuple[KV, float]:
        """(the KV again, seconds of one page one way): scratch goes out and comes back, twice, and the
        second time counts. To be called before the host pool holds anything."""
        hosts, seconds = range(min(WIDTH, self.n_host_pages)), 0.0
        for _ in range(2):
            began = clock()
            self.land([self._take(kv, [PageMove(page=0, host=h, out=True) for h in hosts])])
            kv = self._bring(kv, [PageMove(page=0, host=h, out=False) for h in hosts])
            jax.block_until_ready(kv)
            seconds = clock() - began
        return kv, seconds / (2 * len(hosts))

    def fetch(self, asked: Seq[PageFetch]) -> None:
        """Begin to read pages from disk."""
        for fetch in asked:
            if self.spill is not None:
                self.spill.read(fetch)

    def take_fetched(self) -> list[tuple[int, bool]]:
        """(ticket, found) of the reads that are over; what was found is in its host page."""
        answers = []
        for fetch, data in self.spill.answers() if self.spill is not None else ():
            if data is not None:
                self._put(fetch.host, data)
            answers.append((fetch.ticket, data is not None))
        return answers

    def export(self, kv: KV, pages: Seq[tuple[int, bytes]]) -> int:
        """Begin to write device pages (page, digest) for other engines; those that are written are left out. As
        ``DiskTier.export``."""
        assert self.spill is not None, "there is no disk"
        store = self.spill.store
        pages = [(page, digest) for page, digest in pages if not store.has(digest)]
        number = 0
        for part in _parts(pages) or [[]]:  # where all are written, earlier calls may be under way
            number = self.spill.export(self._named(kv, part))
        return number

    def _named(self, kv: KV, pages: Seq[tuple[int, bytes]]) -> Pages:
        """A function that gives (digest, bytes) of device ``pages`` once they are on the host."""
        if not pages:
            return lambda: ()
        data = self._gather(kv, _padded([page for page, _ in pages]))
        for stack in data:
            stack.copy_to_host_async()

        def named() -> Iterator[tuple[bytes, bytes]]:
            for (_, digest), page in zip(
                pages, zip(*self._by_page(data), strict=True), strict=False
            ):
                yield digest, _bytes_of(page)

        return named

    def flush(self, kv: KV, pages: Seq[tuple[int, bytes]]) -> None:
        """Write device pages (page, digest) to disk and wait until all that waits is written."""
        if self.spill is None:
            return
        for i in range(0, len(pages), WIDTH):
            part = pages[i : i + WIDTH]
            data = self._gather(kv, _padded([page for page, _ in part]))
            self._write(self._by_page(data), [digest for _, digest in part], must=True)
        self.spill.close()

    def _by_page(self, data: Seq[jax.Array]) -> list[np.ndarray]:
        """[WIDTH, arrays, ...] of each stack."""
        return [np.moveaxis(np.asarray(stack), 1 + self._axis, 0) for stack in data]

    def _put(self, host: int, data: bytes) -> None:
        """The bytes of one page into the host pool."""
        at = 0
        for stack in self._stacks:
            page = stack.pool_H[host]
            row = np.frombuffer(data, page.dtype, page.size, at)
            stack.pool_H[host] = row.reshape(page.shape)
            at += page.nbytes

    def _write(self, pages: Seq[np.ndarray], digests: Seq[bytes], *, must: bool = False) -> None:
        if self.spill is None:
            return
        for page, digest in zip(zip(*pages, strict=True), digests, strict=False):
            if digest:
                self.spill.write(digest, _bytes_of(page), must=must)

    def _take(self, kv: KV, moves: Seq[PageMove]) -> Leaving:
        data = self._gather(kv, _padded([move.page for move in moves]))
        for stack in data:
            stack.copy_to_host_async()
        hosts, digests = [move.host for move in moves], [move.digest for move in moves]
        return Leaving(hosts=hosts, digests=digests, data=data)

    def _bring(self, kv: KV, moves: Seq[PageMove]) -> KV:
        hosts, pages_W = (_padded([getattr(m, x) for m in moves]) for x in ("host", "page"))
        data = []
        for stack in self._stacks:
            rows = np.ascontiguousarray(np.moveaxis(stack.pool_H[hosts], 0, 1 + self._axis))
            data.append(jax.device_put(rows, stack.sharding))
        return self._scatter(kv, pages_W, data)

    def _compile(
        self, model: StepModel, make: Compiler
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        axis, stacks = self._axis, self._stacks
        kv = model.abstract_state().kv
        kv_shardings = model.state_shardings().kv
        whole = NamedSharding(model.mesh, PartitionSpec())
        pages_W = jax.ShapeDtypeStruct((WIDTH,), jnp.int32, sharding=whole)
        data = [
            jax.ShapeDtypeStruct(
                (len(s.arrays), *s.shape[:axis], WIDTH, *s.shape[axis:]),
                model.kv_dtype,
                sharding=s.sharding,
            )
            for s in stacks
        ]

        def gather(kv: KV, pages_W: jax.Array) -> list[jax.Array]:
            def taken(arrays: list[tuple[int, int]]) -> jax.Array:
                return jnp.stack([jnp.take(kv[i][j], pages_W, axis=axis) for i, j in arrays])

            return [taken(s.arrays) for s in stacks]

        def scatter(kv: KV, pages_W: jax.Array, data: list[jax.Array]) -> KV:
            at = (*(slice(None),) * axis, pages_W)
            moved: list[Any] = [list(layer) for layer in kv]
            for stack, pages in zip(stacks, data, strict=True):
                for n, (i, j) in enumerate(stack.arrays):
                    moved[i][j] = kv[i][j].at[at].set(pages[n])
            return [tuple(layer) for layer in moved]

        shardings = [s.sharding for s in stacks]
        out = jax.jit(gather, out_shardings=shardings)
        into = jax.jit(scatter, donate_argnums=(0,), out_shardings=kv_shardings)
        return make("gather", out, kv, pages_W), make("scatter", into, kv, pages_W, data)


def identity(model: StepModel, params: Any) -> str:
    """16 hex digits of everything that the bytes of a page depend on: the weights' bits, the
    architecture, what each layer keeps, groups of layers, the backend's layout, types and page size."""

    @jax.jit
    def sums(x: jax.Array) -> jax.Array:
        width = x.dtype.itemsize
        bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
        flat = bits.reshape(-1).astype(jnp.uint32)
        place = jnp.arange(flat.size, dtype=jnp.uint32) * jnp.uint32(2654435761) + 1
        return jnp.stack([flat.sum(dtype=jnp.uint32), (flat * place).sum(dtype=jnp.uint32)])

    digest = hashlib.blake2b(digest_size=8)
    pages = [stack.shape for stack in _stacks(model, 0) for _ in stack.arrays]
    laid = model.rules.described(model.mesh.shape)
    about = (FORMAT, model.family.name, repr(model.arch), model.backend.name, laid, pages)
    if model.dims.groups is not None:
        about = (*about, repr(model.dims.groups))
    digest.update(repr((*about, model.dims.Z, str(model.kv_dtype))).encode())
    if model.drafter is not None:
        digest.update(repr((model.drafter.name, model.drafter.arch, model.drafter.taps)).encode())
    for path, leaf in jax.tree.leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(sums(leaf)).tobytes())
    return digest.hexdigest()


def _stacks(model: StepModel, n_host_pages: int) -> list[_Stack]:
    """The arrays of all layers by shape and mesh axis, in order of first appearance."""
    dtype, axis = model.kv.dtype, model.backend.page_axis
    places: dict[PoolArray, list[tuple[int, int]]] = {}
    for i, layer in enumerate(model.kv_arrays()):
        for j, array in enumerate(layer):
            places.setdefault(array, []).append((i, j))
    found = []
    for array, own in places.items():
        # Split over kv heads as the KV is, behind one more leading dimension.
        spec = PartitionSpec(None, *(None,) * model.backend.kv_axis, array.axis)
        page = array.shape[:axis] + array.shape[axis + 1 :]
        found.append(
            _Stack(
                arrays=own,
                shape=page,
                sharding=NamedSharding(model.mesh, spec),
                pool_H=np.zeros((n_host_pages, len(own), *page), dtype),
            )
        )
    return found


def _bytes_of(page: Iterable[np.ndarray]) -> bytes:
    """A page on disk: one array of each stack, one after the other."""
    return b"".join(stack.tobytes() for stack in page)


def _parts(moves: Seq[T]) -> list[Seq[T]]:
    return [moves[i : i + WIDTH] for i in range(0, len(moves), WIDTH)]


def _padded(ids: list[int]) -> np.ndarray:
    """int32[WIDTH]: ``ids``, then zeros."""
    padded = np.zeros(WIDTH, np.int32)
    padded[: len(ids)] = ids
    return padded
