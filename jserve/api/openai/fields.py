"""OpenAI chat and text completions: request fields, parsed into a ``ParsedRequest``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jserve.api.openai.chat import EFFORT, KWARGS, checked_shape, limited, shaped_chat
from jserve.api.openai.messages import MESSAGES
from jserve.api.openai.tools import TOOLS
from jserve.api.request.fields import (
    Fields,
    ignored,
    label,
    refused,
    sampled,
    shaped,
)
from jserve.api.request.formats import FORMAT, STRUCTURED
from jserve.api.request.parsed import ModelCard, ParsedRequest, Served
from jserve.api.request.shared import Sampling, body_of, check_top, params_of, service_of
from jserve.api.request.tool_format import CHOICE, shape_of
from jserve.api.request.values import MAX_CHOICES, MAX_PICKS, PICKS, PROMPT, ids_of, prompts_of
from jserve.errors import BadRequest, Unsupported


class StreamOptions(Fields):
    """The field ``stream_options``: usage in a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = ignored(False)


class Completion(Sampling):
    """Fields that chat and text completions share."""

    n: int | None = sampled("n")
    max_tokens: int | None = sampled("max_tokens")
    prompt_logprobs: int | None = sampled("prompt_logprobs")
    logprob_token_ids: Any = shaped(PICKS)
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: Any = shaped(FORMAT)
    structured_outputs: Any = shaped(STRUCTURED)
    regex: Any = shaped(STRUCTURED["properties"]["regex"])
    ebnf: Any = shaped(STRUCTURED["properties"]["grammar"])
    grammar: Any = shaped(STRUCTURED["properties"]["grammar"])
    json_schema: Any = shaped(STRUCTURED["properties"]["json"])
    structural_tag: Any = shaped(STRUCTURED["properties"]["structural_tag"])
    metadata: dict[str, str] | None = label()
    store: bool | None = ignored(False)
    service_tier: str | None = ignored("auto", "default")
    prompt_cache_retention: str | None = ignored()
    prompt_cache_options: Any = ignored()
    suffix: Any = refused("")
    audio: Any = refused()
    function_call: Any = refused()
    functions: Any = refused()
    mm_processor_kwargs: Any = refused({})
    modalities: Any = refused(["text"])
    moderation: Any = refused()
    prediction: Any = refused()
    thinking: Any = refused()
    verbosity: Any = refused("medium")
    web_search_options: Any = refused()

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True where every chunk has usage; without ``include_usage`` none has, as in vLLM."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)


class ChatBody(Completion):
    """POST /v1/chat/completions."""

    messages: Any = shaped(MESSAGES, required=True)
    max_completion_tokens: int | None = sampled("max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = sampled("logprobs")
    tools: Any = shaped(TOOLS)
    tool_choice: Any = shaped(CHOICE)
    parallel_tool_calls: bool | None = None
    documents: Any = shaped({"type": ["array", "null"], "items": {"type": "object"}})
    reasoning_effort: Any = shaped(EFFORT)
    chat_template_kwargs: Any = shaped(KWARGS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_token_budget: int | None = sampled("thinking_token_budget")
    include_reasoning: bool | None = None


class CompletionBody(Completion):
    """POST /v1/completions."""

    prompt: Any = shaped(PROMPT, required=True)
    logprobs: int | None = sampled("logprobs")
    echo: bool | None = None
    messages: Any = refused()
    tools: Any = refused()
    tool_choice: Any = refused()
    thinking_token_budget: Any = refused()


def parse_chat(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A chat request, checked.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    body, card = body_of(ChatBody, raw, served), served.card
    length, length_field = _chat_length(body)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    if body.add_special_tokens:
        raise Unsupported("add_special_tokens has no meaning for chat", field="add_special_tokens")
    picks = _picks(body, card, asked=bool(body.logprobs))
    chat, shape = shaped_chat(dict(body), served)
    params = params_of(
        body,
        card,
        named={"max_tokens": length_field},
        n=1 if body.n is None else body.n,
        max_tokens=length,
        logprobs=_n_top(check_top(body.top_logprobs or 0, "top_logprobs"), picks)
        if body.logprobs
        else None,
        logprob_token_ids=picks,
        prompt_logprobs=_prompt_logprobs(body, card),
    )
    return ParsedRequest(
        chat=chat,
        holder="messages",
        length_field=length_field,
        params=replace(
            params,
            **limited(
                body.thinking_token_budget, body.reasoning_effort, "reasoning_effort", served, shape
            ),
        ),
        shape=shape,
        **_common(body),
    )


def _chat_length(body: ChatBody) -> tuple[int | None, str]:
    if body.max_completion_tokens is None:
        name, value = "max_tokens", body.max_tokens
    else:
        name, value = "max_completion_tokens", body.max_completion_tokens
    if body.max_tokens not in (None, value):
        raise BadRequest(
            "max_tokens and max_completion_tokens must be the same where both are given",
            field="max_tokens",
        )
    if value is not None and value < 1:
        raise BadRequest(f"{name} must be at least 1", field=name)
    return value, name


def parse_completion(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A text completion request, checked.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    body, card = body_of(CompletionBody, raw, served), served.card
    prompts = prompts_of(body.prompt, card.vocab_size)
    length = 16 if body.max_tokens is None else body.max_tokens
    if length < 0 or (length == 0 and not body.echo):
        raise BadRequest("max_tokens must be at least 1 (0 with echo)", field="max_tokens")
    picks = _picks(body, card, asked=body.logprobs is not None)
    shape = checked_shape(shape_of(dict(body), None, card.speech), card)
    params = params_of(
        body,
        card,
        n=1 if body.n is None else body.n,
        max_tokens=max(length, 1),
        logprobs=_n_top(check_top(body.logprobs, "logprobs"), picks),
        logprob_token_ids=picks,
        prompt_logprobs=_prompt_logprobs(body, card),
        structured_outputs=shape.spec,
    )
    if params.n * len(prompts) > MAX_CHOICES:
        raise BadRequest(f"n times the prompts may be at most {MAX_CHOICES}", field="n")
    return ParsedRequest(
        prompts=prompts,
        params=params,
        add_special_tokens=body.add_special_tokens is not False,
        shape=shape,
        **_common(body),
    )


def _common(body: Completion) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs cannot be streamed", field="prompt_logprobs")
    return service_of(body)


def _picks(body: Completion, card: ModelCard, *, asked: bool) -> tuple[int, ...] | None:
    """The ids whose log-probabilities the request names; ``asked`` says whether it wants any."""
    name, value = "logprob_token_ids", body.logprob_token_ids
    if value is None:
        return None
    if isinstance(value, list) and len(value) > MAX_PICKS:
        raise BadRequest(f"{name} may hold at most {MAX_PICKS} ids", field=name)
    ids = ids_of(value, name, card.vocab_size)
    if not ids:
        raise BadRequest(f"{name} must not be empty", field=name)
    if not asked:
        raise BadRequest(f"{name} needs logprobs", field=name)
    return ids


def _n_top(n: int | None, picks: tuple[int, ...] | None) -> int | None:
    """The number of likeliest tokens to show: none where the request names others in their place."""
    return n if n is None or picks is None else 0


def _prompt_logprobs(body: ChatBody | CompletionBody, card: ModelCard) -> int | None:
    """The number of likeliest tokens to score at every place of the prompt; None: none is scored."""
    wanted, name = check_top(body.prompt_logprobs, "prompt_logprobs"), "prompt_logprobs"
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        name = name if wanted is not None else "echo"
        wanted = max(wanted or 0, body.logprobs)
    if wanted is not None and not card.scores_prompts:
        raise Unsupported("this server does not score prompt tokens", field=name)
    return wanted
