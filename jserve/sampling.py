"""``SamplingParams``: sampling and structure fields, with the checks that need no model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jserve.errors import BadRequest

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1024
"""Of a server whose option ``max_prompt_logprobs`` allows so many."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 16
MAX_BAD_WORDS = 32
MAX_BAD_WORD_TOKENS = 8
GREEDY_TEMPERATURE = 1e-5
BAN = -100.0
"""A logit_bias down to which a token is forbidden outright."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def require(ok: bool, name: str, message: str) -> None:
    """Raises BadRequest with field ``name`` unless ``ok``."""
    if not ok:
        raise BadRequest(f"{name} {message}", field=name)


def number(value: Any, name: str, low: float, high: float, *, low_open: bool = False) -> None:
    """Raises BadRequest unless ``value`` is a finite number from ``low`` (above it if ``low_open``) to
    ``high``."""
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    require(ok and math.isfinite(value), name, "must be a finite number")
    inside = (value > low if low_open else value >= low) and value <= high
    require(inside, name, f"must be in {'(' if low_open else '['}{low:g}, {high:g}]")


def integer(value: Any, name: str, low: int, high: int) -> None:
    """Raises BadRequest unless ``value`` is an integer from ``low`` to ``high``."""
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(ok, name, f"must be an integer in [{low}, {high}]")


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a number of a request may take."""

    low: float
    high: float
    whole: bool = False
    low_open: bool = False
    """True leaves ``low`` out."""

    def check(self, value: Any, name: str) -> None:
        """Raises BadRequest, naming the field ``name``."""
        if self.whole:
            integer(value, name, int(self.low), int(self.high))
        else:
            number(value, name, self.low, self.high, low_open=self.low_open)


RANGES: Mapping[str, Range] = {
    "n": Range(1, 128, whole=True),
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, low_open=True),
    "top_k": Range(-1, 2**31 - 1, whole=True),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, 100.0, low_open=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "seed": Range(INT64_MIN, INT64_MAX, whole=True),
    "max_tokens": Range(0, 2**31 - 1, whole=True),
    "min_tokens": Range(0, 2**31 - 1, whole=True),
    "thinking_token_budget": Range(-1, 2**31 - 1, whole=True),
    "logprobs": Range(0, MAX_LOGPROBS, whole=True),
    "prompt_logprobs": Range(0, MAX_PROMPT_LOGPROBS, whole=True),
}
"""Of the numbers of ``SamplingParams``; one that is None is not checked."""
_OPTIONAL = ("seed", "max_tokens", "thinking_token_budget", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The structure that the output must have: exactly one of the first six fields. Names are vLLM's.

    Raises:
        BadRequest: none or several are given, or one is of the wrong type; ``field`` names it.
    """

    json: Any = None
    """A JSON schema, as an object or as JSON text."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    """One of these texts, to the letter."""
    grammar: str | None = None
    """Lark (llguidance's dialect) or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: Any = None
    """``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, or that as JSON text."""
    whitespace_pattern: str | None = None
    """Regex of the white space between JSON tokens; None writes JSON as ``json.dumps`` does."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        n_given = len(self.given)
        names = ", ".join(STRUCTURES)
        require(n_given == 1, "structured_outputs", f"must set exactly one of {names}")
        require(self.json is None or isinstance(self.json, dict | str), *_wrong("json", "schema"))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            require(value is None or isinstance(value, str), *_wrong(name, "string"))
        words = self.choice is None or (
            bool(self.choice) and all(isinstance(w, str) and w for w in self.choice)
        )
        require(words, *_wrong("choice", "list of non-empty strings"))
        self._check_options()
        tag = self.structural_tag
        require(tag is None or isinstance(tag, dict | str), *_wrong("structural_tag", "object"))

    def _check_options(self) -> None:
        """Refuses options of JSON's form where there is no JSON, and those that exclude each other."""
        asked = [name for name in _JSON_OPTIONS if getattr(self, name) not in (None, False)]
        for name in asked:
            has_json = self.given[0] in ("json", "json_object", "structural_tag")
            require(has_json, f"structured_outputs.{name}", f"says nothing to {self.given[0]}")
        both = {"whitespace_pattern", "disable_any_whitespace"} <= {*asked}
        where = "structured_outputs.disable_any_whitespace"
        require(not both, where, "and whitespace_pattern exclude each other")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the structures that are set; one, once checked."""
        return tuple(n for n in STRUCTURES if getattr(self, n) not in (None, False))


_JSON_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _wrong(name: str, kind: str) -> tuple[str, str]:
    return f"structured_outputs.{name}", f"must be a {kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The token ids that separate reasoning from the answer; from the model's chat format."""

    open_id: int
    close_id: int
    end_ids: tuple[int, ...]
    """The ids that end a thought that runs out of its budget, ``close_id`` among them. The ids before it count as
    tokens of the thought."""
    gap_ids: tuple[int, ...] = ()
    """The text between ``close_id`` and a structured answer."""
    inside: bool = False
    """True when the prompt ends inside a thought."""

    @property
    def n_lead(self) -> int:
        """Ids of ``end_ids`` before ``close_id``."""
        return self.end_ids.index(self.close_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters by which tokens are drawn. Field names, defaults and ranges are vLLM's.

    Raises:
        BadRequest: a field is out of its range; ``field`` names it.
    """

    n: int = 1
    temperature: float = 1.0
    """0 means greedy; below 1e-5 is treated as 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 switches it off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Any int64. None derives one from the request id; choice i of n uses seed + i."""
    max_tokens: int | None = 16
    """None means as many as the context leaves."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    """Have the log-probabilities of exactly these ids beside every drawn token's, in place of those of
    the likeliest."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to an additive bias in [-100, 100]; -100 bans the token outright."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    """Strings never to be produced; turned into ``bad_token_ids`` where a tokenizer is at hand."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    structured_outputs: StructuredOutputs | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """Names of step features that the program registered (``jserve.register_feature``), each with what it
    is asked; their values are in ``CompletionOutput.extra``."""
    thinking_token_budget: int | None = None
    """Most tokens between the tags of a thought, which is then closed; -1 is no limit. None is no limit
    either, but before a structured answer the thought leaves it half of the output tokens."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(
                self, name, (value,) if isinstance(value, str) else tuple(value or ())
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_token_ids", tuple(tuple(w) for w in self.bad_token_ids or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprob_token_ids", tuple(self.logprob_token_ids))
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                allowed.check(value, name)
        if self.max_tokens is not None:
            require(self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens")

    def _check_lists(self) -> None:
        require(
            all(isinstance(s, str) and s for s in self.stop), "stop", "must hold non-empty strings"
        )
        require(len(self.stop) <= 16, "stop", "may hold at most 16 strings")
        require(
            len(self.stop_token_ids) <= MAX_STOP_IDS,
            "stop_token_ids",
            f"may hold at most {MAX_STOP_IDS} ids",
        )
        require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"may hold at most {MAX_LOGIT_BIAS} entries",
        )
        for value in self.logit_bias.values():
            number(value, "logit_bias", -100.0, 100.0)
        require(
            isinstance(self.extra_args, Mapping)
            and all(isinstance(k, str) for k in self.extra_args),
            "extra_args",
            "must be a mapping from names",
        )
        require(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")
        require(self.logprob_token_ids != (), "logprob_token_ids", "must not be empty")
        both = self.logprob_token_ids is not None and bool(self.logprobs)
        require(
            not both, "logprob_token_ids", "takes the place of logprobs, which must be 0 or None"
        )
        require(
            all(isinstance(s, str) and s for s in self.bad_words),
            "bad_words",
            "must hold non-empty strings",
        )
        require(
            len(self.bad_token_ids) <= MAX_BAD_WORDS,
            "bad_words",
            f"may hold at most {MAX_BAD_WORDS} entries",
        )
        require(
            all(0 < len(w) <= MAX_BAD_WORD_TOKENS for w in self.bad_token_ids),
            "bad_words",
            f"entries must be 1 to {MAX_BAD_WORD_TOKENS} tokens long",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def shows_logprobs(self) -> bool:
        """True when the log-probabilities of drawn tokens are wanted."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def shows_more(self) -> bool:
        """True when drawn tokens come with more than their ids."""
        return self.shows_logprobs or bool(self.extra_args)

    @property
    def penalised(self) -> bool:
        """True when sampling needs the token counts of a vocab row."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def guided(self) -> bool:
        """True when the tokens to come depend on what the drawn ones say."""
        return self.structured_outputs is not None or self.limits_thought

    @property
    def limits_thought(self) -> bool:
        return self.thinking_token_budget not in (None, -1)

    @property
    def loaded(self) -> bool:
        """True when the slot on the device must hold something of these parameters."""
        named = self.logprob_token_ids is not None
        return self.needs_vocab_row or self.bans_words or named

    @property
    def needs_vocab_row(self) -> bool:
        """True when sampling needs counts or biases of every id of the vocabulary."""
        return self.penalised or self.biased

    @property
    def biased(self) -> bool:
        """True when sampling needs the biases of a vocab row."""
        single = any(len(word) == 1 for word in self.bad_token_ids)
        return bool(self.logit_bias) or self.allowed_token_ids is not None or single

    @property
    def bans_words(self) -> bool:
        """True when a token may be banned by those before it: some bad word has several."""
        return any(len(word) > 1 for word in self.bad_token_ids)
