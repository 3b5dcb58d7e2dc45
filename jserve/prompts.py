"""Converts prompts of the Python interface (text, token ids, dialogues) to requests. Names are vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

from jserve.errors import BadRequest
from jserve.outputs import PartialOutput
from jserve.request_options import RequestOptions
from jserve.sampling import SamplingParams, Thinking
from jserve.text.bad_words import bad_token_ids
from jserve.text.chat.fields import chat_of
from jserve.text.chat.speech import Speech
from jserve.text.chat.template import ChatTemplate
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request

Prompt = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": str}`` / ``{"prompt_token_ids": [int]}``."""
Message = Mapping[str, Any]
"""As in a chat completion."""
DIALOGUE = (
    "tools",
    "documents",
    "reasoning_effort",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
"""The fields of a chat completion that may be given beside the messages of a dialogue."""


class Prompts:
    """Makes requests for one model.

    Args:
        tokenizer: the model's.
        chat: its chat template; None where it has none.
        eos_ids: tokens that end its answers.
        speech: how it marks its thoughts.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        chat: ChatTemplate | None,
        eos_ids: tuple[int, ...],
        speech: Speech,
    ) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._eos_ids, self._speech = eos_ids, speech
        self._ids = itertools.count()

    def new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        id: str | None = None,
        options: RequestOptions | None = None,
        drawn: bool = True,
    ) -> PartialOutput:
        """A request for ``prompt``, ready to collect what comes of it.

        Args:
            drawn: False for a request without an answer, such as one that makes a cache.

        Raises:
            BadRequest: a field is out of range, or the model has no thoughts to be limited.
        """
        if drawn and params.max_tokens == 0:  # as over HTTP
            raise BadRequest("max_tokens must be at least 1", field="max_tokens")
        text, ids = self._tokenised(prompt)
        if params.bad_words:
            words = bad_token_ids(self._tokenizer, params.bad_words)
            params = replace(params, bad_token_ids=(*params.bad_token_ids, *words))
        request = Request.of(
            options or RequestOptions(),
            id=id or self.new_id(),
            prompt_ids=tuple(ids),
            params=params,
            eos_ids=self._eos_ids,
            thinking=self._thinking(prompt, params, ids),
        )
        return PartialOutput(request, text, self._tokenizer)

    def dialogue(self, messages: Seq[Message], template: Mapping[str, Any]) -> Prompt:
        """The prompt of a dialogue's next answer. Messages and the members of ``template`` (``DIALOGUE``
        names them) are read as those of a chat completion.

        Raises:
            BadRequest: the model has no chat template, a name that is none of these, or whatever a
            chat completion would be refused for.
        """
        unknown = sorted(template.keys() - {*DIALOGUE})
        if unknown:
            raise BadRequest(f"chat takes no {unknown[0]!r}", field=unknown[0])
        if self._chat is None:
            raise BadRequest(
                "the model has no chat template", field="messages", code="no_chat_template"
            )
        said = [dict(m) if isinstance(m, Mapping) else m for m in messages]
        given = {"messages": said, **template}
        fields = {**dict.fromkeys((*DIALOGUE, "tool_choice")), **given}
        ids = self._tokenizer.encode_parts(self._chat.render(chat_of(fields, self._chat)))
        return {"prompt_token_ids": ids, "chat": True}

    def _thinking(self, prompt: Prompt, params: SamplingParams, ids: list[int]) -> Thinking | None:
        """The thought that may come first: before an answer of a given structure in chats only."""
        if params.limits_thought and self._speech.thinking is None:
            raise BadRequest(
                "this model's thoughts cannot be limited", field="thinking_token_budget"
            )
        chats = isinstance(prompt, Mapping) and prompt.get("chat")
        if params.limits_thought or (params.guided and chats):
            return self._speech.thinking_after(ids, self._tokenizer)
        return None

    def _tokenised(self, prompt: Any) -> tuple[str | None, list[int]]:
        """(the text if there is one, token ids). Raises BadRequest for what is no prompt."""
        ids, text = prompt, None
        if isinstance(prompt, Mapping):
            ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        elif isinstance(prompt, str):
            ids, text = None, prompt
        if ids is None and isinstance(text, str):
            return text, self._tokenizer.encode(text)
        if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping):
            raise _no_prompt()
        return None, list(ids)


def listed(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. Raises BadRequest for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise _no_prompt()
    many = list(prompts)
    return [many] if many and isinstance(many[0], int) else many  # type: ignore[list-item]


def _no_prompt() -> BadRequest:
    wanted = "text, token ids, or a dict with prompt or prompt_token_ids"
    return BadRequest(f"prompt must be {wanted}", field="prompt")
