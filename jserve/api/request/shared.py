"""Request fields common to all dialects: sampling and service options.

It owns vLLM's sampling extensions and our service fields (lanes, deadlines, caches), and how both become values of
a ``ParsedRequest``. Numbers are range-checked by ``SamplingParams``; lists are bounded here before they are looked
at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from jserve.api.request.fields import (
    B,
    Fields,
    ignored_fields,
    label,
    refused,
    sampled,
    shaped,
    validate,
)
from jserve.api.request.naming import renamed
from jserve.api.request.parsed import ModelCard, Served
from jserve.api.request.values import (
    BIAS,
    CUSTOM,
    RETAIN,
    STOP,
    XARGS,
    bias_of,
    check_taps,
    custom_of,
    ids_of,
    name_of,
    retain_of,
    salt_of,
    stop_ids_of,
    stop_of,
    top_of,
    xargs_of,
)
from jserve.errors import BadRequest, NotFound, shown
from jserve.request_options import Lane, RequestOptions
from jserve.sampling import SamplingParams

Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
Milliseconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Words = Annotated[list[str], Field(max_length=64, fail_fast=True)]

MAX_KEPT = 2**31 - 1


class Service(Fields):
    """Service fields: model, lane, deadlines, caching, identity."""

    model: str | None = None
    stream: bool | None = None
    priority: int | None = None
    lane: Literal["interactive", "standard", "bulk"] | None = None
    ttft_deadline_ms: Milliseconds | None = None
    tpot_deadline_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    cache_salt: str | None = None
    cache: str | None = None
    session: str | None = None
    retain: Any = shaped(RETAIN)
    skip_prefix_cache: bool | None = None
    speculative: bool | None = None
    truncate_prompt_tokens: int | None = shaped({"minimum": -1, "maximum": MAX_KEPT})
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = None
    user: str | None = label()
    safety_identifier: str | None = label()
    prompt_cache_key: str | None = label()
    kv_transfer_params: Any = refused()
    chat_template: Any = refused()


class Sampling(Service):
    """Sampling fields under vLLM's names. Those of vLLM, SGLang or llama.cpp that cannot be applied are refused."""

    temperature: float | None = sampled("temperature")
    top_p: float | None = sampled("top_p")
    top_k: int | None = sampled("top_k")
    min_p: float | None = sampled("min_p")
    presence_penalty: float | None = sampled("presence_penalty")
    frequency_penalty: float | None = sampled("frequency_penalty")
    repetition_penalty: float | None = sampled("repetition_penalty")
    seed: int | None = sampled("seed")
    stop: Any = shaped(STOP)
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = sampled("min_tokens")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Any = shaped(BIAS)
    allowed_token_ids: Ids | None = None
    bad_words: Words | None = None
    vllm_xargs: Any = shaped(XARGS)
    logits_processors: Any = refused([])
    length_penalty: Any = refused(1, 1.0)
    use_beam_search: Any = refused(False)
    best_of: Any = refused(1)
    regex: Any = refused()
    ebnf: Any = refused()
    json_schema: Any = refused()
    grammar: Any = refused()
    structural_tag: Any = refused()
    custom_logit_processor: Any = refused()
    custom_params: Any = shaped(CUSTOM)
    detokenize: Any = refused(True)
    logprob_token_ids: Any = refused()
    lora_path: Any = refused()
    no_stop_trim: Any = refused(False)
    prompt_embeds: Any = refused()
    return_hidden_states: Any = refused(False)
    spaces_between_special_tokens: Any = refused(True)


def body_of(kind: type[B], raw: Mapping[str, Any], served: Served) -> B:
    """``raw`` as a ``kind`` of body; its ``model``, where it names one, is the served one.

    Raises:
        BadRequest, Unsupported: as ``validate``.
        NotFound: ``model`` is not a name of the served model.
    """
    body = validate(kind, raw, strict=served.strict)
    name = getattr(body, "model", None)
    if name is not None and not served.card.knows(name):
        raise NotFound(f"the model {shown(name)} does not exist", field="model")
    return body


def service_of(body: Service) -> dict[str, Any]:
    """The arguments of a ``ParsedRequest`` that every dialect has: its body and what the service fields ask for.

    Raises:
        BadRequest: a value out of its range, or two that exclude each other.
    """
    keep = body.truncate_prompt_tokens
    if keep is not None and (keep == 0 or not -1 <= keep <= MAX_KEPT):
        raise BadRequest(
            f"truncate_prompt_tokens must be -1 or in [1, {MAX_KEPT}]",
            field="truncate_prompt_tokens",
        )
    if body.truncation_side is not None and keep is None:
        raise BadRequest("truncation_side needs truncate_prompt_tokens", field="truncation_side")
    if body.cache is not None and keep is not None:
        raise BadRequest(
            "truncate_prompt_tokens would cut what cache names", field="truncate_prompt_tokens"
        )
    if not -(2**63) <= (body.priority or 0) < 2**63:
        raise BadRequest("priority must be a 64-bit integer", field="priority")
    return {
        "body": body,
        "stream": bool(body.stream),
        "ignored": ignored_fields(body),
        "truncate": keep,
        "truncate_left": body.truncation_side != "right",
        "options": RequestOptions(
            priority=body.priority or 0,
            lane=Lane(body.lane or Lane.STANDARD),
            ttft_deadline_ms=body.ttft_deadline_ms,
            tpot_deadline_ms=body.tpot_deadline_ms,
            deadline_ms=body.deadline_ms,
            cache_salt=salt_of(body.cache_salt),
            cache=name_of(body.cache, "cache"),
            session=name_of(body.session, "session"),
            retain=retain_of(body.retain),
            skip_prefix_cache=bool(body.skip_prefix_cache),
            speculative=body.speculative is not False,
        ),
    }


_DRAWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
)


def params_of(
    body: Sampling, card: ModelCard, *, named: Mapping[str, str] | None = None, **more: Any
) -> SamplingParams:
    """Sampling parameters: the model's defaults, then the body's fields, then ``more``.

    Args:
        named: the dialect's name of a parameter where it is another, for errors.

    Raises:
        BadRequest: a value out of its range, under the dialect's name.
    """
    given = {name: getattr(body, name) for name in _DRAWN if getattr(body, name) is not None}
    try:
        xargs = xargs_of(body.vllm_xargs)
        check_taps(xargs, card)
        lists = {
            "stop": stop_of(body.stop),
            "logit_bias": bias_of(body.logit_bias, card.vocab_size),
            "stop_token_ids": stop_ids_of(body.stop_token_ids, card),
            "extra_args": xargs | custom_of(body.custom_params, xargs),
        }
        if body.allowed_token_ids is not None:
            ids_of(body.allowed_token_ids, "allowed_token_ids", card.vocab_size)
        return SamplingParams(**{**card.defaults, **given, **lists, **more})
    except BadRequest as e:
        raise renamed(e, named or {}) from None


def check_top(value: int | None, field: str) -> int | None:
    """Raises BadRequest for a number of likeliest tokens out of its range."""
    return None if value is None else top_of(value, field)
