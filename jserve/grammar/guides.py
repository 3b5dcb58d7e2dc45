"""Compiles grammars in threads and computes all token bitmasks in one batch beside the device step.

It owns the threads and what is being computed (``ports.Guides``). ::

    commit k    take -> guides that moved -> kick --.
    plan k+2    settle (0.5 ms at most)             '--> mask thread: one llguidance call for all
                those without a mask wait a step         (its own threads, no GIL)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from jserve.cores import n_cores
from jserve.errors import where
from jserve.faults import point
from jserve.grammar.compiler import CompiledGrammar, GrammarCompiler
from jserve.grammar.guide import MaskKit, TokenGuide
from jserve.grammar.thought import Thought, default_budget
from jserve.grammar.vocab import Vocabulary, blanks, ll_tokenizer
from jserve.types import Request

log = logging.getLogger(__name__)

COMPILE_THREADS = 2
HUNG_S = 5.0
"""Bitmasks that take longer are abandoned, and their sequences end: the others need the thread."""


class TokenGuides:
    """``ports.Guides`` for one vocabulary.

    Args:
        make_vocabulary: called once, in a thread, when the first grammar comes.
        fast_forward: put in forced tokens without a model step.
        mask_threads: llguidance's; 0 takes half of the cores.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        fast_forward: bool = True,
        mask_threads: int = 0,
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._fast_forward = fast_forward
        self._n_threads = mask_threads or max(1, n_cores() // 2)
        self._compiling = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="jserve-grammar")
        self._masking = _one_thread()
        self._setup = threading.Lock()
        self._parts: tuple[GrammarCompiler, MaskKit, LLExecutor] | None = None
        self._alive: WeakSet[TokenGuide] = WeakSet()
        self._batch: Future[None] | None = None
        self._moved: list[TokenGuide] = []
        """Those whose masks are computed, since when (monotonic seconds)."""
        self._since = 0.0
        self.n_masks = 0

    def close(self) -> None:
        """End the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)

    def compile(self, request: Request) -> Future[None] | None:
        if not request.params.guided or self._known(request):
            return None
        return self._compiling.submit(self._compile, request)

    def guide(self, request: Request, most: int) -> TokenGuide | None:
        params = request.params
        if not params.guided or (params.structured_outputs is None and request.thinking is None):
            return None
        compiler, kit, _ = self._ready()
        compiled = self._compiled(compiler, request)
        thought = Thought(
            tags=request.thinking,
            budget=_budget(request, most),
            structured=compiled is not None,
            blank_ids=kit.blank_ids,
        )
        fast = self._fast_forward and not params.shows_more
        made = TokenGuide(kit, compiled, thought, fast=fast)
        self._alive.add(made)
        return made

    def start_masks(self) -> None:
        if self._batch is not None and not self._batch.done():
            return  # those who move meanwhile are caught by the next ``wait_masks``
        self._moved = moved = [guide for guide in self._alive if guide.needs_mask]
        self._batch = self._masking.submit(self._compute, moved) if moved else None
        self._since = time.monotonic()

    def wait_masks(self, timeout_s: float | None) -> None:
        if timeout_s is None and self._batch is None:
            self.start_masks()
        if self._landed(timeout_s):
            self.start_masks()  # those who moved while it was computed
            if timeout_s is None:
                self._landed(None)

    def _landed(self, timeout_s: float | None) -> bool:
        """Wait for the masks under way, ``timeout_s`` or until they are given up; True: there were some, and
        nothing is under way now."""
        if self._batch is None:
            return False
        try:
            self._batch.result(HUNG_S if timeout_s is None else timeout_s)
        except TimeoutError:
            if time.monotonic() - self._since < HUNG_S:
                return False
            self._give_up()
        self._batch = None
        return True

    def _give_up(self) -> None:
        """Fail the guides whose bitmasks do not arrive, and abandon their thread."""
        log.error("masks of %d sequences took longer than %.0f s", len(self._moved), HUNG_S)
        for guide in self._moved:
            guide.give_up(f"what it allows next was not known within {HUNG_S:.0f} s")
        self._masking.shutdown(wait=False)
        self._masking = _one_thread()

    def _known(self, request: Request) -> bool:
        spec = request.params.structured_outputs
        if self._parts is None:
            return False
        return spec is None or self._parts[0].known(spec) is not None

    @point("grammar.compile")
    def _compile(self, request: Request) -> None:
        compiler, _, _ = self._ready()
        self._compiled(compiler, request)

    def _compiled(self, compiler: GrammarCompiler, request: Request) -> CompiledGrammar | None:
        spec = request.params.structured_outputs
        return None if spec is None else compiler.compile(spec)

    def _ready(self) -> tuple[GrammarCompiler, MaskKit, LLExecutor]:
        with self._setup:
            if self._parts is None:
                vocab = self._make_vocabulary()
                compiler = GrammarCompiler(ll_tokenizer(vocab))
                kit = MaskKit(
                    compiler.n_words,
                    vocab.eos_ids,
                    canonical=vocab.encode is not None,
                    blank_ids=blanks(vocab),
                )
                self._parts = (compiler, kit, LLExecutor(num_threads=self._n_threads))
            return self._parts

    def _compute(self, guides: list[TokenGuide]) -> None:
        compiler, _, executor = self._ready()
        mask_GW = np.zeros((len(guides), compiler.n_words), np.int32)
        jobs = [(guide.matcher, i) for i, guide in enumerate(guides)]
        self.n_masks += len(guides)
        try:
            self._fill(executor, jobs, mask_GW)
        except Exception as error:  # of one of them: each alone, so that no other pays for it
            log.error("masks failed: %s", where(error))
            for guide in guides:
                guide.compute()
            return
        for guide, mask_W in zip(guides, mask_GW, strict=True):
            guide.put(mask_W)

    @point("grammar.mask")
    def _fill(self, executor: LLExecutor, jobs: list[Any], mask_GW: np.ndarray) -> None:
        fill_next_token_bitmask_par(executor, jobs, mask_GW)


def _budget(request: Request, most: int) -> int | None:
    """Most tokens of the thought; None is no limit."""
    params = request.params
    if params.limits_thought:
        return params.thinking_token_budget
    says = params.thinking_token_budget is not None
    if says or request.thinking is None or params.structured_outputs is None:
        return None
    return default_budget(most, request.thinking)


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="jserve-mask")
