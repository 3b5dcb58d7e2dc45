"""Validates a request against the model's limits before it enters the wait queue.

``SamplingParams`` has checked itself. Every integer that will be used as an index on the device is range-checked
here, since JAX clamps a bad index to a wrong answer.
"""

from __future__ import annotations

from collections.abc import Collection

from jserve.errors import BadRequest, ContextTooLong, NotFound
from jserve.ports import RunnerLimits
from jserve.sampling import MAX_STOP_IDS, SamplingParams
from jserve.sched.admission import constraints
from jserve.types import Lane, Request
from jserve.window import PageDemand

MAX_DEADLINE_MS = 1e9
_LANES = tuple(lane.value for lane in Lane)


def check(
    request: Request,
    limits: RunnerLimits,
    vocab: int | None = None,
    demand: PageDemand | None = None,
) -> int:
    """The most tokens (prompt and output) that ``request`` may reach.

    ``vocab`` is the number of real token ids where it is below the padded ``limits.vocab_size``.
    ``demand``: the pages that one sequence holds; None: those of all its tokens.

    Raises:
        BadRequest: an id out of range, an empty prompt, an option the engine was built without.
        ContextTooLong: prompt and output exceed the context or can never fit the KV pool.
        NothingAllowed: its constraints leave no token to be drawn.
        NotFound: the adapter is not loaded.
    """
    _check_ids(request, vocab or limits.vocab_size)
    _check_said(request)
    constraints.check_static(request, vocab or limits.vocab_size)
    _check_features(request, limits)
    _check_service(request)
    max_len = _max_len(request, limits, _room(limits, demand))
    if any(ids and len(request.prompt_ids) + len(ids) >= max_len for ids in request.said):
        raise BadRequest("said leaves a choice no token to be drawn", field="said")
    return max_len


def _check_said(request: Request) -> None:
    if request.said and (len(request.said) != request.params.n or not request.open_choices):
        raise BadRequest(
            f"said must hold {request.params.n} entries, and one choice that is not over",
            field="said",
        )


def _check_ids(request: Request, vocab: int) -> None:
    params = request.params
    if not request.prompt_ids:
        raise BadRequest("prompt must hold at least one token", field="prompt")
    _in_range(request.prompt_ids, vocab, "prompt")
    _in_range([t for ids in request.said for t in ids or ()], vocab, "said")
    _in_range(request.eos_ids, vocab, "eos_ids")
    _in_range(params.stop_token_ids, vocab, "stop_token_ids")
    _in_range(params.logit_bias, vocab, "logit_bias")
    _in_range(params.allowed_token_ids or (), vocab, "allowed_token_ids")
    _in_range(params.logprob_token_ids or (), vocab, "logprob_token_ids")
    _in_range([t for word in params.bad_token_ids for t in word], vocab, "bad_words")


def _in_range(ids: Collection[int], vocab: int, field: str) -> None:
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab):
        return
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab:
            raise BadRequest(
                f"{field} holds the token id {str(i)[:24]}, ids are integers in [0, {vocab - 1}]",
                field=field,
            )


def _check_features(request: Request, limits: RunnerLimits) -> None:
    params = request.params
    n_stops = len({*params.stop_token_ids, *request.eos_ids})
    if n_stops > MAX_STOP_IDS:
        raise BadRequest(
            f"stop_token_ids and the model's EOS ids are {n_stops} ids together,"
            f" at most {MAX_STOP_IDS} fit",
            field="stop_token_ids",
        )
    if params.prompt_logprobs is not None and not limits.scores_prompts:
        raise BadRequest("prompt_logprobs is switched off on this server", field="prompt_logprobs")
    if (params.prompt_logprobs or 0) > limits.max_prompt_logprobs:
        raise BadRequest(
            f"prompt_logprobs must be at most {limits.max_prompt_logprobs}", field="prompt_logprobs"
        )
    _check_picks(params, limits)
    _check_vocab_row(params, limits)
    _check_extra(params, limits)
    if params.guided:
        _check_guided(request, limits)
    if params.bad_words and not params.bad_token_ids:
        raise BadRequest("bad_words needs a tokenizer to become token ids", field="bad_words")
    if request.adapter is not None:
        raise NotFound(f"no adapter named {request.adapter[:64]!r} is loaded", field="model")


def _check_picks(params: SamplingParams, limits: RunnerLimits) -> None:
    name, n = "logprob_token_ids", len(params.logprob_token_ids or ())
    if n and not limits.picks:
        raise BadRequest(f"{name} is switched off on this server", field=name)
    if n > limits.picks:
        raise BadRequest(f"{name} holds {n} ids, at most {limits.picks} fit", field=name)


def _check_vocab_row(params: SamplingParams, limits: RunnerLimits) -> None:
    if not params.needs_vocab_row or limits.n_vocab_rows:
        return
    given = {
        "repetition_penalty": params.repetition_penalty != 1.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": True,
    }
    name = next(name for name, asked in given.items() if asked)
    raise BadRequest(f"{name} is switched off on this server: max_penalized_seqs is 0", field=name)


def _check_extra(params: SamplingParams, limits: RunnerLimits) -> None:
    for name, asked in params.extra_args.items():
        field = f"extra_args.{name[:64]}"
        if name not in limits.features:
            there = ", ".join(limits.features) or "none"
            raise BadRequest(
                f"{field}: no such step feature, this engine was built with {there}", field=field
            )
        try:
            limits.features[name](asked)
        except ValueError as error:
            raise BadRequest(f"{field}: {error}", field=field) from None


def kv_name_of(request: Request, limits: RunnerLimits) -> str:
    """The text that names what step features change of the KV of a request; "" where ``check`` refuses it."""
    params, n = request.params, len(request.prompt_ids)
    names = sorted({*params.extra_args} & {*limits.kv_names})
    try:
        for name in names:
            limits.features[name](params.extra_args[name])
        return " ".join(
            f"{name}:{limits.kv_names[name](params.extra_args[name], n)}" for name in names
        )
    except ValueError:
        return ""


def is_long(request: Request, short_context: int) -> bool:
    """True where a text of ``request`` may outgrow ``RunnerLimits.short_context``. Without ``max_tokens`` it may; with
    a named cache it is taken to, so that all requests that name one can read it."""
    most = request.params.max_tokens
    if not short_context or request.is_long or request.cache is not None or most is None:
        return short_context > 0
    return len(request.prompt_ids) + most > short_context


def prompt_features_of(params: SamplingParams, limits: RunnerLimits) -> tuple[str, ...]:
    """The step features whose values of prompt tokens checked parameters ask for."""
    asked = params.extra_args
    return tuple(n for n, wants in limits.prompt_features.items() if n in asked and wants(asked[n]))


def _check_service(request: Request) -> None:
    """Lane and deadlines, which every door takes from its client."""
    if request.lane not in _LANES:
        raise BadRequest(f"lane must be one of {', '.join(_LANES)}", field="lane")
    for field in ("ttft_deadline_ms", "tpot_deadline_ms", "deadline_ms"):
        value = getattr(request, field)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= MAX_DEADLINE_MS:
            raise BadRequest(
                f"{field} must be a number in (0, {MAX_DEADLINE_MS:g}] milliseconds", field=field
            )


def _check_guided(request: Request, limits: RunnerLimits) -> None:
    params = request.params
    name = "structured_outputs" if params.structured_outputs else "thinking_token_budget"
    if not limits.masks:
        raise BadRequest(f"{name} is switched off on this server", field=name)
    if params.structured_outputs is not None and not request.eos_ids:
        raise BadRequest(f"{name} needs a model with an end token", field=name)
    thinking = request.thinking
    if thinking is None:
        return
    ids = (thinking.open_id, thinking.close_id, *thinking.end_ids, *thinking.gap_ids)
    _in_range(ids, limits.vocab_size, "thinking")


def _room(limits: RunnerLimits, demand: PageDemand | None) -> int:
    """Tokens that one sequence alone may reach in the pool; the last one drawn is never computed, so it
    needs no page."""
    demand = demand or PageDemand(page_size=limits.page_size)
    return demand.room(limits.n_pages - 1, limits.max_model_len) + 1


def _max_len(request: Request, limits: RunnerLimits, pool: int) -> int:
    n_prompt, wanted = len(request.prompt_ids), request.params.max_tokens
    if wanted is None:
        room = min(limits.max_model_len, pool) - n_prompt
        if room < max(1, request.params.min_tokens):
            raise _too_long(n_prompt, max(1, request.params.min_tokens), limits, pool)
        return n_prompt + room
    total = n_prompt + wanted
    if total > limits.max_model_len or max(n_prompt + 1, total) > pool:
        raise _too_long(n_prompt, wanted, limits, pool)
    return total


def _too_long(n_prompt: int, wanted: int, limits: RunnerLimits, pool: int) -> ContextTooLong:
    if n_prompt + wanted > limits.max_model_len:
        limit = f"the context holds {limits.max_model_len}"
    else:
        limit = f"the KV pool of {limits.n_pages - 1} pages holds {pool}"
    return ContextTooLong(
        f"the prompt has {n_prompt} tokens and {wanted} more are wanted,"
        f" {n_prompt + wanted} in all; {limit}",
        field="prompt" if n_prompt >= min(limits.max_model_len, pool) else "max_tokens",
    )
