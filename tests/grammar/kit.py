"""A small vocabulary, an engine over the fake runner with guides, and a plain reference walk."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.grammar.compiler import GrammarCompiler
from jserve.grammar.guides import TokenGuides
from jserve.grammar.spec import lowered
from jserve.grammar.vocab import ll_tokenizer, vocabulary
from jserve.ports import RunnerLimits
from jserve.sampling import SamplingParams, StructuredOutputs, Thinking
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.testing.model import FakeModel, Visible, mix
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Output, Request

SPECIAL = ("<|end|>", "<|im_start|>", "[CALLS]")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = ['{"name": "get_weather", "arguments": {"city": "Paris", "n": 12, "ok": true}}'] * 3
EOS = 0
VOCAB = 330
"""Wider than the tokenizer, as a padded embedding is."""


@functools.cache
def tokenizer() -> TextTokenizer:
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=[*SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    hf.train_from_iterator([*WORDS, "the red car and the red house, in the city of Paris"], trainer)
    hf.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return TextTokenizer(hf)


def ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def thinking(**changes: Any) -> Thinking:
    (open_id,), (close_id,) = ids("<think>"), ids("</think>")
    values = {
        "open_id": open_id,
        "close_id": close_id,
        "end_ids": ids("\n</think>\n\n"),
        "gap_ids": ids("\n\n"),
    }
    return Thinking(**values | changes)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ll_tokenizer(vocabulary(tokenizer(), VOCAB, (EOS,))))


def guides(**options: Any) -> TokenGuides:
    return TokenGuides(lambda: vocabulary(tokenizer(), VOCAB, (EOS,)), mask_threads=1, **options)


def limits(**changes: Any) -> RunnerLimits:
    values = {
        "n_slots": 8,
        "max_rows": 8,
        "max_decode_rows": 8,
        "max_prefill_tokens": 32,
        "max_prefill_rows": 4,
        "max_drafts": 0,
        "n_pages": 200,
        "page_size": 8,
        "max_model_len": 400,
        "vocab_size": VOCAB,
    }
    return RunnerLimits(**values | changes)


def engine(
    *,
    overlap: int = 1,
    proposer: Any = None,
    journal: Any = None,
    fast_forward: bool = True,
    step_s: float = 0.0,
    all_guides: Any = None,
    **changes: Any,
) -> Engine:
    bounds = limits(**changes)
    runner = FakeRunner(bounds, step_s=step_s)
    config = EngineConfig.of(max_num_batched_tokens=64, max_num_seqs=bounds.n_slots)
    made = all_guides or guides(fast_forward=fast_forward)
    scheduler = Scheduler(bounds, config, proposer=proposer, journal=journal, guides=made)
    return Engine(scheduler, runner, overlap=overlap)


def request(
    id: str, spec: StructuredOutputs | None = None, *, prompt: str = "the red car", **params: Any
) -> Request:
    tags = params.pop("thinking", None)
    values = {"max_tokens": 120, "temperature": 0.0, "structured_outputs": spec}
    return Request(
        id=id,
        prompt_ids=ids(prompt),
        params=SamplingParams(**values | params),
        eos_ids=(EOS,),
        thinking=tags,
    )


def schema(**fields: Any) -> StructuredOutputs:
    return StructuredOutputs(json={"type": "object", "additionalProperties": False, **fields})


CITY = schema(
    properties={
        "city": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["sun", "rain", "snow and hail"]},
    },
    required=["city", "n", "kind"],
)


def gather(outputs: list[Output]) -> dict[tuple[str, int], list[Output]]:
    found: dict[tuple[str, int], list[Output]] = {}
    for output in outputs:
        found.setdefault((output.request_id, output.index), []).append(output)
    return found


def tokens(outputs: list[Output], id: str, index: int = 0) -> list[int]:
    return [t for o in gather(outputs).get((id, index), []) for t in o.token_ids]


def finish(outputs: list[Output], id: str, index: int = 0) -> str | None:
    last = gather(outputs)[id, index][-1]
    return None if last.finish is None else last.finish.value


def text(drawn: list[int]) -> str:
    return tokenizer().decode(drawn)


def run(*requests: Request, **options: Any) -> list[Output]:
    made = engine(**options)
    for item in requests:
        made.submit(item)
    outputs = made.drain()
    made.scheduler.resources.check()
    return outputs


def reference(r: Request, spec: StructuredOutputs, seed: int) -> list[int]:
    """The tokens by definition: a matcher, a mask per token, the fake's drawing rule; no engine."""
    model = FakeModel(vocab_size=VOCAB)
    matcher = LLMatcher(compiler().tokenizer, lowered(spec), log_level=0)
    drawn: list[int] = []
    forced: list[int] = []
    while len(drawn) < (r.params.max_tokens or 0):
        forced = forced or list(matcher.compute_ff_tokens())
        mask_1W = np.zeros((1, -(-VOCAB // 32)), np.int32)
        if matcher.is_stopped():
            drawn.append(EOS)
            break
        if forced:
            token = forced.pop(0)
        else:
            fill_next_token_bitmask(matcher, mask_1W)
            token = _draw(model, r, drawn, seed, mask_1W[0])
        drawn.append(token)
        if token == EOS:
            break
        assert matcher.consume_token(token)
    return drawn


def first_free(r: Request) -> int:
    """The first token of ``r`` if it had no structure; its request gives a seed."""
    assert r.params.seed is not None
    return _draw(FakeModel(vocab_size=VOCAB), r, [], r.params.seed, None)


def _draw(
    model: FakeModel, r: Request, drawn: list[int], seed: int, mask_W: np.ndarray | None
) -> int:
    visible = Visible(model)
    for token in (*r.prompt_ids, *drawn):
        visible.add(token)
    at = len(r.prompt_ids) + len(drawn)
    return model.draw(mix(visible.seen), at, seed, r.params, (EOS,), 0, mask_W)
