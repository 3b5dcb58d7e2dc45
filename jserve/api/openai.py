"""OpenAI's request fields: read, checked, and mapped to an ``Ask``. Also vLLM's extensions.

Owns the promise that every field is applied, refused by name, or listed as ignored; with
``openai_messages`` (the chat side) and ``openai_reply`` (the answers) it alone knows OpenAI's
names. Must not know HTTP, the engine or the tokenizer. Numbers are range-checked by
``SamplingParams``; lists are bounded here before they are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jserve.api.ask import Ask, ModelCard, Wish
from jserve.api.chat import Chat, ChatTemplate
from jserve.api.errors import Unsupported, shown
from jserve.api.openai_messages import chat_of
from jserve.api.openai_structure import Shape, shape_of
from jserve.api.openai_values import (
    MAX_CHOICES,
    bias_of,
    ids_of,
    name_of,
    prompts_of,
    retain_of,
    salt_of,
    stop_ids_of,
    stop_of,
    top_of,
)
from jserve.errors import BadRequest, NotFound
from jserve.sampling import SamplingParams
from jserve.types import Lane

Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
Milliseconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Words = Annotated[list[str], Field(max_length=64, fail_fast=True)]

# Known fields that are not honoured, with the values that ask for nothing (null always does).
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "ebnf": (),
    "function_call": (),
    "functions": (),
    "grammar": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "regex": (),
    "structural_tag": (),
    "suffix": ("",),
    "thinking": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_CHAT_ONLY = frozenset({"messages", "tools", "tool_choice", "thinking_token_budget"})


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(BaseModel):
    """Fields that chat and text completions share."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Any = None
    allowed_token_ids: Ids | None = None
    bad_words: Words | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    lane: Literal["interactive", "standard", "bulk"] | None = None
    ttft_deadline_ms: Milliseconds | None = None
    tpot_deadline_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    cache_salt: str | None = None
    cache: str | None = None
    session: str | None = None
    retain: Any = None
    skip_prefix_cache: bool | None = None
    speculative: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None


def read(kind: type, raw: Mapping[str, Any]) -> Any:
    """``raw`` as a ``kind`` of body.

    Raises:
        BadRequest: a field of the wrong type, named.
        Unsupported: a known field that is not honoured, named.
    """
    for name, value in raw.items():
        _refuse(name, value)
    try:
        return kind.model_validate(raw)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        name = _path(first["loc"])
        raise BadRequest(f"{name}: {first['msg']}", field=name) from None
    except RecursionError:
        raise BadRequest("the body is nested too deep", code="invalid_json") from None


def _refuse(name: str, value: Any) -> None:
    guided = name.startswith("guided_")
    if value is None or (name not in _REFUSED and not guided):
        return
    if any(value == v and type(value) is type(v) for v in _REFUSED.get(name, ())):
        return
    raise Unsupported(f"{name[:64]} is not supported by this server", field=name)


def _path(loc: tuple[Any, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "body"


def ignored_fields(body: BaseModel) -> tuple[str, ...]:
    """Names of the fields set in ``body`` that had no effect: printable, 20 at most."""
    names = list(body.model_extra or {})
    options = getattr(body, "stream_options", None)
    names += [f"stream_options.{n}" for n in (options.model_extra if options else None) or {}]
    set_names = [n for n in names if _value(body, n) is not None and n not in _REFUSED]
    return tuple(re.sub(r"[^A-Za-z0-9_.\-]", "?", n[:64]) for n in set_names[:20])


def _value(body: BaseModel, name: str) -> Any:
    return (body.model_extra or {}).get(name, True)


def check_model(name: str | None, card: ModelCard) -> None:
    """Raises:
    NotFound: ``name`` is not a name of the served model.
    """
    if name is not None and not card.knows(name):
        raise NotFound(f"the model {shown(name)} does not exist", field="model")


def chat_wish(raw: Mapping[str, Any], card: ModelCard, template: ChatTemplate | None) -> Wish:
    """A chat request, checked.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    body: ChatBody = read(ChatBody, raw)
    check_model(body.model, card)
    length, length_field = _chat_length(body)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    if body.add_special_tokens:
        raise Unsupported("add_special_tokens has no meaning for chat", field="add_special_tokens")
    logprobs = top_of(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
    chat = _chat(body, template)
    shape = _shape(body, chat.tools, card)
    params = _params(body, card, max_tokens=length, logprobs=logprobs, field=length_field)
    ask = Ask(
        chat=chat,
        field="messages",
        length_field=length_field,
        params=replace(params, **_talk(body, shape, card)),
        shape=shape,
        **_common(body),
    )
    return Wish(body=body, ask=ask, stream=bool(body.stream), ignored=ignored_fields(body))


def _talk(body: ChatBody, shape: Shape, card: ModelCard) -> dict[str, Any]:
    """Sampling parameters that follow from how the model talks."""
    found: dict[str, Any] = {"structured_outputs": shape.spec}
    budget = body.thinking_token_budget
    if budget is not None and budget != -1:
        if budget < -1:
            raise BadRequest(
                "thinking_token_budget must be at least 0, or -1", field="thinking_token_budget"
            )
        if card.speech.thinking is None or not card.masks:
            raise Unsupported(
                "this model's thoughts cannot be limited", field="thinking_token_budget"
            )
        found["thinking_token_budget"] = budget
    if card.speech.keeps_special and (shape.calls or card.speech.tags is not None):
        found["skip_special_tokens"] = False
    return found


def _shape(body: Body, tools: list[dict[str, Any]] | None, card: ModelCard) -> Shape:
    values = {name: getattr(body, name) for name in type(body).model_fields}
    shape = shape_of(values, tools, card.speech)
    if shape.spec is not None and not card.masks:
        name = shape.field.split(".")[0]
        raise Unsupported(f"{name} is switched off on this server", field=name)
    if shape.spec is not None and not card.eos_ids:
        name = shape.field.split(".")[0]
        raise Unsupported(f"{name} needs a model with an end token", field=name)
    return shape


def _chat_length(body: ChatBody) -> tuple[int | None, str]:
    if body.max_completion_tokens is None:
        name, value = "max_tokens", body.max_tokens
    else:
        name, value = "max_completion_tokens", body.max_completion_tokens
    if value is not None and value < 1:
        raise BadRequest(f"{name} must be at least 1", field=name)
    return value, name


def _chat(body: ChatBody, template: ChatTemplate | None) -> Chat:
    fields = {name: getattr(body, name) for name in ChatBody.model_fields}
    return chat_of(fields, template)


def completion_wish(raw: Mapping[str, Any], card: ModelCard) -> Wish:
    """A text completion request, checked.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    for name in _CHAT_ONLY & raw.keys():
        if raw[name] is not None:
            raise Unsupported(f"{name} belongs to /v1/chat/completions", field=name)
    body: CompletionBody = read(CompletionBody, raw)
    check_model(body.model, card)
    prompts = prompts_of(body.prompt, card.vocab_size)
    length = 16 if body.max_tokens is None else body.max_tokens
    if length < 0 or (length == 0 and not body.echo):
        raise BadRequest("max_tokens must be at least 1 (0 with echo)", field="max_tokens")
    logprobs = None if body.logprobs is None else top_of(body.logprobs, "logprobs")
    params = _params(body, card, max_tokens=max(length, 1), logprobs=logprobs, field="max_tokens")
    if params.n * len(prompts) > MAX_CHOICES:
        raise BadRequest(f"n times the prompts may be at most {MAX_CHOICES}", field="n")
    shape = _shape(body, None, card)
    ask = Ask(
        prompts=prompts,
        params=replace(params, structured_outputs=shape.spec),
        add_special_tokens=body.add_special_tokens is not False,
        shape=shape,
        **_common(body),
    )
    return Wish(body=body, ask=ask, stream=bool(body.stream), ignored=ignored_fields(body))


def _common(body: Body) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true", field="stream_options")
    if body.stream and body.prompt_logprobs:
        raise BadRequest("prompt_logprobs cannot be streamed", field="prompt_logprobs")
    keep = body.truncate_prompt_tokens
    if keep is not None and (keep < -1 or keep == 0):
        raise BadRequest(
            "truncate_prompt_tokens must be -1 or at least 1", field="truncate_prompt_tokens"
        )
    if body.cache is not None and keep is not None:
        raise BadRequest(
            "truncate_prompt_tokens would cut what cache names", field="truncate_prompt_tokens"
        )
    if not -(2**63) <= (body.priority or 0) < 2**63:
        raise BadRequest("priority must be a 64-bit integer", field="priority")
    return {
        "truncate": keep,
        "truncate_left": body.truncation_side != "right",
        "priority": body.priority or 0,
        "lane": Lane(body.lane or Lane.STANDARD),
        "ttft_deadline_ms": body.ttft_deadline_ms,
        "tpot_deadline_ms": body.tpot_deadline_ms,
        "deadline_ms": body.deadline_ms,
        "cache_salt": salt_of(body.cache_salt),
        "cache": name_of(body.cache, "cache"),
        "session": name_of(body.session, "session"),
        "retain": retain_of(body.retain),
        "skip_prefix_cache": bool(body.skip_prefix_cache),
        "speculative": body.speculative is not False,
    }


def _params(
    body: Body, card: ModelCard, *, max_tokens: int | None, logprobs: int | None, field: str
) -> SamplingParams:
    values: dict[str, Any] = dict(card.defaults)
    for name in _SAMPLING:
        if getattr(body, name) is not None:
            values[name] = getattr(body, name)
    values["stop"] = stop_of(body.stop)
    values["logit_bias"] = bias_of(body.logit_bias, card.vocab_size)
    values["stop_token_ids"] = stop_ids_of(body.stop_token_ids, card)
    if body.allowed_token_ids is not None:
        ids_of(body.allowed_token_ids, "allowed_token_ids", card.vocab_size)
    prompt_logprobs = _prompt_logprobs(body, logprobs, card)
    try:
        return SamplingParams(
            **values, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
    except BadRequest as e:
        # The parameters know one name for the length; the client may have used another.
        if e.field == "max_tokens" and field != "max_tokens":
            raise BadRequest(e.message.replace("max_tokens", field), field=field) from None
        raise


_SAMPLING = (
    "n",
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


def _prompt_logprobs(body: Body, logprobs: int | None, card: ModelCard) -> int | None:
    echo = getattr(body, "echo", None) and logprobs is not None
    wanted = body.prompt_logprobs
    name = "prompt_logprobs" if wanted is not None else "echo"
    if wanted is not None:
        top_of(wanted, "prompt_logprobs")
    if echo:
        wanted = max(wanted or 0, logprobs or 0)
    if wanted is not None and not card.scores_prompts:
        raise Unsupported("this server does not score prompt tokens", field=name)
    return wanted
