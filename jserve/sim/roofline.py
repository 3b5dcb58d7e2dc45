"""Roofline model of a step: bytes over bandwidth, flops over peak rate, collectives over links.

``limit`` is what physics leaves; ``seconds`` is what an engine is expected to make of it.

    bytes of one device   read / tp + KV of the rows / tp + KV of the new tokens / tp
    flops of one device   (2 * active * tokens + 2 * unembed * drawn + 4 * N * H * tokens * seen) / tp
    read                  weights; of a layer's E experts E * (1 - (1 - X/E) ** tokens), as many as tokens choose that
                          choose at random. One token alone meets X of them: ``active``. With ``ep`` groups of
                          devices, those of the fullest group
    seen                  tokens that one token reads, in all layers together
    links                 2 L + 1 sums of float32[tokens, hidden], one gather of float32[drawn, vocab]; or the sums of a
                          narrower type, in two collectives each; or logits that stay split, and small ones for the
                          draw; or, where prompts are computed, sums in parts and gathers of what products read
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from jserve.config import DEVICE_SHARE, SCRATCH_SHARE, CacheOptions
from jserve.errors import ConfigError
from jserve.kv_layout import KVGroups, KVLayout, chosen_groups
from jserve.model.arch import Arch, DecoderLayer, Mlp, Moe

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The rates that one device reaches, those of its links with its neighbours included."""

    name: str
    bytes_per_s: float
    flops: float
    """bfloat16 with float32 sums."""
    memory: float
    """Bytes that its driver reports; 0 is the memory of the machine that asks."""
    reached: float
    """Share of the two rates that a whole step reaches."""
    step_s: float
    """Seconds of a step beside reading and multiplying: launch, norms, sampling."""
    link_bytes_per_s: float = 0.0
    """To all neighbours together, one way; 0: it has none."""
    link_s: float = 0.0
    """Seconds of a collective however little it carries."""
    shared: bool = False
    """Devices are parts of one machine, which has these rates once, as XLA's forced CPU devices are."""
    capability: str = ""
    """Compute capability of a CUDA device, which decides what its kernels can be."""
    copy_bytes_per_s: float = 50e9
    """Between its memory and the host's, one way: four fifths of PCIe 5 x16, a guess."""


CHIPS = {
    # Rates as measured on one: copy bandwidth 4.3 of the data sheet's 4.8 TB/s, bfloat16 matrix
    # products 780 of its dense 989 TFLOP/s. NVLink 4: 900 GB/s in both directions by data sheet.
    # Serving engines publish 50 to 90 % of that roofline for 8B models, hence ``reached``.
    # ``step_s`` and ``link_s`` (a small NCCL sum within one host) are guesses.
    "h200": Chip(
        name="NVIDIA H200",
        capability="9.0",
        bytes_per_s=4.3e12,
        flops=780e12,
        memory=139.8 * GIB,
        reached=0.7,
        step_s=3e-4,
        link_bytes_per_s=450e9,
        link_s=8e-6,
    ),
    # The SXM5 card of 80 GB: the same chip, so the H200's matrix rate; 90 % of the data sheet's
    # 3.35 TB/s, the share that the H200 reaches of its own. Not measured.
    "h100": Chip(
        name="NVIDIA H100 SXM",
        capability="9.0",
        bytes_per_s=3.0e12,
        flops=780e12,
        memory=79.1 * GIB,
        reached=0.7,
        step_s=3e-4,
        link_bytes_per_s=450e9,
        link_s=8e-6,
    ),
    # Data sheet of the HGX board: 8 TB/s, 2.25 PFLOP/s dense bfloat16, 180 GB, NVLink 5 of 1.8 TB/s
    # in both directions; the H200's shares of them. Not measured, and no kernel here is for it.
    "b200": Chip(
        name="NVIDIA B200",
        capability="10.0",
        bytes_per_s=7.2e12,
        flops=1.78e15,
        memory=178.4 * GIB,
        reached=0.7,
        step_s=3e-4,
        link_bytes_per_s=900e9,
        link_s=8e-6,
    ),
    # Two EPYC cores as a round of bench.serving found them: XLA's products, which pack the weights anew in
    # every call, read 16 GB/s of them at few rows and make 790 GFLOP/s at 500. More cores give more;
    # `jserve bench steps` measures. Its devices are those that XLA is told to make of it, and links their copies.
    "cpu": Chip(
        name="CPU (two cores)",
        bytes_per_s=16e9,
        flops=790e9,
        memory=0,
        reached=1.0,
        step_s=1e-3,
        link_bytes_per_s=8e9,
        link_s=5e-5,
        shared=True,
        copy_bytes_per_s=8e9,  # a copy reads and writes
    ),
}


GATHERED = 2
"""Devices up to which narrow partial sums are gathered whole, in one collective."""
SPLIT_DRAW = (3, 24.0)
"""Collectives of a greedy draw from split logits, and bytes of an all-reduce for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The bytes, flops and collectives of one step on one device."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    n_collectives: int
    link_bytes: float
    """Sent by one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """``ports.StepCosts`` of a decoder sharded over ``tp`` chips: the slower of memory and
    arithmetic, then the collectives."""

    arch: Arch
    itemsize: float
    """Bytes of a weight."""
    chip: Chip
    kv_itemsize: int
    tp: int = 1
    """Chips that share every dense product, those of all groups."""
    ep: int = 1
    """Groups of these that have different experts."""
    sum_itemsize: int = 4
    """Bytes of a number of partial sums between chips."""
    splits_logits: bool = False
    splits_residual: bool = False
    """In steps that compute prompts each chip keeps the residual stream of a part of the tokens."""
    read_itemsize: int = 4
    """Bytes of a number of that stream as products of plain weights read it."""
    kv: KVLayout = field(init=False)
    """In pages of one token."""
    _attention: int = field(init=False, compare=False, repr=False)
    """Parameters of attention in all layers."""
    _ffns: tuple[tuple[Mlp | Moe, int], ...] = field(init=False, compare=False, repr=False)
    """The other parts of layers, and how many are alike."""
    _met: dict[tuple[float, int], float] = field(init=False, compare=False, repr=False)
    """Answers of ``_layers``: a simulation asks at every step, of few sizes."""
    _reads: tuple[int, int] = field(init=False, compare=False, repr=False)
    """Gathers of a split residual stream in all layers, and bytes of a number of each, added up."""

    def __post_init__(self) -> None:
        parts = [layer.attn.n_weights(self.arch.D) for layer in self.arch.layers]
        object.__setattr__(self, "_attention", sum(parts))
        ffns = Counter(layer.ffn for layer in self.arch.layers)
        object.__setattr__(self, "_ffns", tuple(ffns.items()))
        object.__setattr__(self, "_met", {})
        reads = [n for layer in self.arch.layers for n in _reads(layer, self.read_itemsize)]
        object.__setattr__(self, "_reads", (len(reads), sum(reads)))
        layers, dtype = self.arch.kv_layers, np.dtype(f"V{self.kv_itemsize}")
        kv = KVLayout(layers=layers, page_size=1, dtype=dtype, tp=self.tp)
        object.__setattr__(self, "kv", kv)

    @property
    def body(self) -> int:
        """Parameters of all layers."""
        return int(self._layers(math.inf))

    @property
    def active(self) -> int:
        """Parameters of all layers that one token meets."""
        return int(self._layers(1))

    def _layers(self, tokens: float, ep: int = 1) -> float:
        """Parameters of all layers that a step of so many tokens meets, as many on each of ``ep`` groups as on the
        fullest."""
        met = self._met.get((tokens, ep))
        if met is None:
            D = self.arch.D
            met = self._attention + sum(n * _ffn(ffn, D, tokens, ep) for ffn, n in self._ffns)
            self._met[tokens, ep] = met
        return met

    @property
    def unembed(self) -> int:
        """Parameters of the output embedding."""
        return self.arch.D * self.arch.V

    def work(
        self, *, rows: int, tokens: int, drawn: int, n_context: float, prefills: bool = False
    ) -> Work:
        """Of a step whose ``rows`` read ``n_context`` tokens each, ``tokens`` of which are new and
        ``drawn`` of which give logits; ``prefills``: it computes prompts. Every weight is read once, the unembedding
        included, but for experts that nobody chose."""
        arch, tp = self.arch, self.tp
        attention = arch.layers[0].attn.key_flops * tokens * self.kv.seen(n_context)
        flops = 2 * self.active * tokens + 2 * self.unembed * drawn + attention
        n_collectives, link_bytes = self._exchanged(tokens, drawn, prefills)
        return Work(
            weight_bytes=self.itemsize * (self._layers(tokens, self.ep) + self.unembed) / tp,
            kv_bytes=self.kv.step_bytes(rows, tokens, n_context),
            flops=flops / tp,
            n_collectives=n_collectives,
            link_bytes=link_bytes,
        )

    def _exchanged(self, tokens: int, drawn: int, prefills: bool) -> tuple[int, float]:
        """Collectives, and the bytes that one chip sends in them."""
        if self.tp == 1:
            return 0, 0.0
        n, each = self._sums(prefills)
        n_draw, drawn_bytes = SPLIT_DRAW if self.splits_logits else (1, 4.0 * self.arch.V)
        sent = each * tokens * self.arch.D + drawn_bytes * drawn
        return n + n_draw, sent * (self.tp - 1) / self.tp

    def _sums(self, prefills: bool) -> tuple[int, int]:
        """Collectives of the residual stream, and the bytes that they send for each of its numbers."""
        of_layers, whole = 2 * self.arch.L, 2 * self.sum_itemsize
        of_sum = 2 if self.sum_itemsize < 4 and self.tp > GATHERED else 1
        if not (prefills and self.splits_residual):
            return of_sum * (of_layers + 1), whole * (of_layers + 1)
        # The embedding's sum is whole; what leaves the final norm is gathered in float32.
        n_reads, read = self._reads
        return of_sum + of_layers + n_reads + 1, whole + of_layers * self.sum_itemsize + read + 4

    def limit(self, work: Work) -> float:
        """Seconds at the chip's rates, collectives apart."""
        moved = (work.weight_bytes + work.kv_bytes) / self.chip.bytes_per_s
        return max(moved, work.flops / self.chip.flops)

    def is_compute_bound(self, work: Work) -> bool:
        return self.limit(work) == work.flops / self.chip.flops

    def links(self, work: Work) -> float:
        """Seconds of the step's collectives, one after the other."""
        return self._link_s(work.n_collectives, work.link_bytes)

    def exchange_s(self, tokens: int, drawn: int, prefills: bool) -> float:
        """``links`` of the ``work`` of such a step."""
        return self._link_s(*self._exchanged(tokens, drawn, prefills))

    def exchange_rates(self, prefills: bool) -> tuple[float, float, float]:
        """(seconds of a step, of each token, of each token drawn): ``exchange_s`` is linear in these."""
        base = self.exchange_s(0, 0, prefills)
        return base, self.exchange_s(1, 0, prefills) - base, self.exchange_s(0, 1, prefills) - base

    def _link_s(self, n_collectives: int, sent: float) -> float:
        if not n_collectives or not self.chip.link_bytes_per_s:
            return 0.0
        return n_collectives * self.chip.link_s + sent / self.chip.link_bytes_per_s

    def expected(self, work: Work) -> float:
        """Seconds that an engine takes: the rates as far as steps reach them, and the rest."""
        return self.limit(work) / self.chip.reached + self.links(work) + self.chip.step_s

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        """``expected`` of a step in which prefill counts as one row."""
        rows = n_decode + (n_prefill > 0)
        tokens, prefills = n_decode + n_prefill, n_prefill > 0
        return self.expected(
            self.work(rows=rows, tokens=tokens, drawn=rows, n_context=n_context, prefills=prefills)
        )

    def groups(self, options: CacheOptions) -> KVGroups | None:
        """The groups of layers that pages belong to with these options; None: to all.

        Raises:
            ConfigError: option ``kv_groups`` is on, and it cannot be.
        """
        return chosen_groups(self.kv.layers, options.kv_groups, ())

    def page_bytes(self, options: CacheOptions) -> int:
        """Bytes of a KV page on one device, of a CPU's size where the options leave it to the device."""
        kv = replace(self.kv, groups=self.groups(options))
        return kv.page_bytes * options.on("cpu").page_size

    def n_pages(self, options: CacheOptions) -> int:
        """Pages that fit on one chip, as the cache options say.

        Raises:
            ConfigError: the weights leave no room, or the chip has no memory of its own.
        """
        if options.n_pages:
            return options.n_pages
        if not (self.chip.memory or options.kv_memory_gb):
            raise ConfigError(
                f"{self.chip.name}: set n_pages or kv_memory_gb, it has no memory of its own",
                field="n_pages",
            )
        stored = self.itemsize * (self.body + self.unembed * (1 if self.arch.tied else 2))
        used = options.memory_utilization - SCRATCH_SHARE
        room = self.chip.memory * DEVICE_SHARE * used - stored
        if options.kv_memory_gb:
            room = options.kv_memory_gb * GIB
        n = int(room // self.page_bytes(options))
        if n < 2:
            raise ConfigError(
                f"{self.chip.name}: the weights leave no room for KV", field="memory_utilization"
            )
        return n


def _reads(layer: DecoderLayer, itemsize: int) -> list[int]:
    """Bytes of a number that each sublayer reads of a split residual stream (``layers.entering``); routers and latents
    read float32."""
    has_experts = isinstance(layer.ffn, Moe)
    attention = 4 if has_experts or layer.attn.latent is not None else itemsize
    return [attention] if layer.parallel else [attention, 4 if has_experts else itemsize]


def _ffn(ffn: Mlp | Moe, D: int, tokens: float, ep: int = 1) -> float:
    """Parameters of a layer beside attention that a step of so many tokens meets, with ``ep`` times the experts of
    the fullest group."""
    if isinstance(ffn, Mlp):
        return 3 * D * ffn.F
    met = ep * _of_fullest(ffn.E * (1 - (1 - ffn.X / ffn.E) ** tokens), ffn.E, ep)
    shared = ffn.shared.F if ffn.shared else 0
    return D * (ffn.E + 3 * (met * ffn.F + shared))


def _of_fullest(met: float, E: int, ep: int) -> float:
    """Experts that the fullest of ``ep`` groups has of ``met`` out of ``E``, each in any place: the mean, and the
    largest of as many normal deviations (Blom)."""
    if ep == 1:
        return met
    mean = met / ep
    deviation = math.sqrt(mean * (1 - 1 / ep) * (1 - met / E))
    largest = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    return min(mean + largest * deviation, met, E / ep)
